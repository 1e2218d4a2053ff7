"""What a feature adds to a record, and what the answer and other texts say of it.

The type belongs to the feature, which names it in its `plugin.py`.  A record keeps what a feature added that is absent
here, as plain JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Self

import msgspec

from pytest_fa.feature import features
from pytest_fa.records.record import Record, RecordKind


class Proposal(NamedTuple):
    """What to type next: the options of a command, and a word before it.  Without options, nothing is proposed."""

    word: str = ""
    options: tuple[str, ...] = ()


class Added(msgspec.Struct, frozen=True):
    """The base class of what a feature adds to a record.

    `feature` is the feature's name, and the key in `Record.added`; `kind` is that of its records.  With `spans_cases`,
    such a record is about several cases, whose outputs were judged once more, and has no case of its own.  `prefix`
    stands before the outcome of a failure in the answer.
    """

    feature: ClassVar[str]
    kind: ClassVar[RecordKind]
    spans_cases: ClassVar[bool] = False
    prefix: ClassVar[str] = ""

    @classmethod
    def of(cls, record: Record) -> Self | None:
        """What the feature added to a record, if it did."""
        value = record.added.get(cls.feature)
        return value if isinstance(value, cls) else None

    @classmethod
    def all_of(cls, records: Iterable[Record]) -> list[Self]:
        """What the feature added to these records."""
        return [value for record in records if (value := cls.of(record))]

    def to(self, record: Record) -> Record:
        """The record with this, in place of what the feature added before."""
        return msgspec.structs.replace(record, added={**record.added, self.feature: self})

    def details(self) -> Sequence[str]:
        """Lines in the text of a failed test."""
        return ()

    def seconds_by_part(self) -> Iterable[tuple[str, float]]:
        """The parts of the test besides its stages, each with its seconds."""
        return ()

    @classmethod
    def words(cls, records: Sequence[Record]) -> list[str]:
        """What the answer says of the records of one variant."""
        del records
        return []

    @classmethod
    def words_of_many(cls, records: Sequence[Record]) -> list[str]:
        """What the answer says of the records of several variants."""
        del records
        return []

    @classmethod
    def last_line(cls, records: Sequence[Record]) -> str:
        """A result that the answer ends with, in place of a command; empty if there is none."""
        del records
        return ""

    @classmethod
    def proposal(cls, records: Sequence[Record], *, is_faster: bool) -> Proposal | None:
        """What to type after a run with times, whether or not it used the feature; None leaves it to other features.

        `is_faster` says that the fastest variant takes less time than the baselines at every shape.
        """
        del records, is_faster
        return None


@functools.cache
def added_types() -> dict[str, type[Added]]:
    """The type of what each feature adds to a record, by the name of the feature."""
    return {feature.name: feature.named(feature.added) for feature in features() if feature.added}


def added_kinds(*, spans_cases: bool | None = None) -> tuple[RecordKind, ...]:
    """The kinds of records to which features add something; all, or those that span cases, or that do not."""
    return tuple(each.kind for each in added_types().values() if spans_cases in (None, each.spans_cases))


def added_to(record: Record) -> list[Added]:
    """What the features that are here added to a record."""
    return [value for value in record.added.values() if isinstance(value, Added)]
