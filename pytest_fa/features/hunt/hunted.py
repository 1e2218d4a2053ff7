"""What `--fa-hunt` adds to a record: how many cases were judged, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from pytest_fa.records.added import Added
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.ranges import Natural, Seconds
from pytest_fa.records.record import Record


class Find(msgspec.Struct, frozen=True):
    """One fault: its smallest example, what is wrong with it, and in which others it shows.

    `first` is the example with which it was found.  `failed` of `judged` judgements of the smallest one failed, each
    with a few calls.  `matters` says which values of the case the fault needs, as far as others were tried.
    `shrinking` counts the judgements from the first example to the smallest, and `command` judges that again.
    `reference` names the public report of a known fault.
    """

    example: str
    first: str
    outcome: Outcome
    message: str
    cause: str
    matters: tuple[str, ...]
    failed: Natural
    judged: Natural
    after: Natural
    shrinking: Natural
    command: str
    note: str = ""
    reference: str = ""

    @property
    def lines(self) -> Iterator[str]:
        """The fault as text."""
        yield f"{self.example}: {self.outcome.headline}{self.message}"
        if self.cause:
            yield f"  likely cause: {self.cause}"
        if self.reference:
            yield f"  known: {self.reference}"
        yield f"  what matters: {'; '.join(self.matters) if self.matters else 'nothing: any case may fail'}"
        if self.failed < self.judged:
            yield f"  it fails in {self.failed} of {self.judged} judgements"
        if self.first != self.example:
            yield f"  found as {self.first} after {self.after} cases, shrunk in {self.shrinking} more"
        if self.note:
            yield f"  {self.note}"
        yield f"  again: {self.command}"


class Hunt(Added, frozen=True):
    """One hunt of a variant: `judged` examples in `seconds`, `refused` of them by the variant, as it may.

    `seed` repeats it.  `judging_seconds` are those of the judge alone.  `unexpected` are known faults that no longer
    show.
    """

    feature: ClassVar = "hunt"
    kind: ClassVar = "hunt"
    spans_cases: ClassVar = True
    prefix: ClassVar = "hunt: "

    judged: Natural
    refused: Natural
    seconds: Seconds
    judging_seconds: Seconds
    seed: Natural
    finds: tuple[Find, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def new_finds(self) -> tuple[Find, ...]:
        """The faults that no ledger knows."""
        return tuple(find for find in self.finds if not find.reference)

    @property
    def summary(self) -> str:
        """The hunt in one line."""
        rate = self.judged / self.seconds if self.seconds else 0.0
        refused = f", {self.refused} refused" if self.refused else ""
        known = len(self.finds) - len(self.new_finds)
        found = f"{len(self.new_finds)} fault{'s' * (len(self.new_finds) != 1)}" if self.new_finds else "no fault"
        cases = f"{self.judged:,} case{'s' * (self.judged != 1)}"
        return (
            f"{cases} in {self.seconds:.0f} s ({rate:.1f} a second{refused}), seed {self.seed}: {found}"
            f"{f', {known} known' if known else ''}"
        )

    def details(self) -> Sequence[str]:
        """The numbers, and each fault with its smallest case."""
        return [self.summary, *(line for find in self.finds for line in find.lines), *self.unexpected]

    @classmethod
    def words(cls, records: Sequence[Record]) -> list[str]:
        """What was hunted."""
        hunts = cls.all_of(records)
        cases = sum(hunt.judged for hunt in hunts)
        return [f"{cases:,} random cases"] if hunts else []
