"""What features add to records: it has the type of its feature, or stays as it is if the feature is absent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest

from pytest_fa.feature import SuiteTest, features
from pytest_fa.records import read
from pytest_fa.records.added import Added, added_to, added_types
from pytest_fa.records.compact import compact_lines
from pytest_fa.records.ranges import Natural
from pytest_fa.records.read import read_line, read_record
from pytest_fa.records.record import Record, to_builtins, to_json
from pytest_fa.table.answer import RunFacts, answer_lines
from pytest_fa.table.failure import failure_text
from pytest_fa.table.slowest_stages import seconds_by_part
from tests.factories import RECORD, record


class Counted(Added, frozen=True):
    """What a made-up feature adds."""

    feature: ClassVar = "counted"
    kind: ClassVar = "selftest"

    count: Natural
    label: str = "usual"

    def details(self) -> tuple[str, ...]:
        """One line."""
        return (f"counted {self.count}",)

    def seconds_by_part(self) -> Iterator[tuple[str, float]]:
        """One part."""
        yield "counting", 2.0


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the feature known to the reader of records."""
    monkeypatch.setitem(vars(read)["_ADDED"], Counted.feature, Counted)


COUNTED = Counted(3).to(RECORD)


@pytest.mark.usefixtures("counting")
def test_what_a_feature_added_has_its_type() -> None:
    """It is read back equal from a line of a run, from a saved line and from a test report."""
    (saved,) = compact_lines([COUNTED])
    assert [COUNTED] * 3 == [read_record(to_json(COUNTED)), read_line(saved, {}), read_record(to_builtins(COUNTED))]
    assert (Counted.of(COUNTED), Counted.of(RECORD), Counted.all_of([RECORD, COUNTED])) == (
        Counted(3),
        None,
        [Counted(3)],
    )


def test_a_saved_line_leaves_out_usual_values() -> None:
    """A field of a feature with its default is left out of a saved line."""
    (saved,) = compact_lines([COUNTED])
    assert msgspec.json.decode(saved)["added"] == {"counted": {"count": 3}}


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(
    ("value", "place"),
    [({"count": -1}, r"`\$\.added\.counted\.count`"), ({}, "count"), (None, "null"), ({"count": 2**60}, "count")],
    ids=["out of range", "missing", "null", "too large"],
)
def test_an_impossible_value_is_refused(value: object, place: str) -> None:
    """A record with an impossible value of a feature is refused, with the place of the value."""
    with pytest.raises(msgspec.ValidationError, match=place):
        read_record({**to_builtins(RECORD), "added": {"counted": value}})


def test_what_an_absent_feature_added_is_kept() -> None:
    """A record is read although one of its features is absent, is written again as it was, and says nothing of it."""
    content = {**to_builtins(RECORD), "added": {"absent": {"count": -1, "rows": [1, {"x": None}]}}}
    found = read_record(content)
    assert (to_builtins(found), added_to(found)) == (content, [])
    (saved,) = compact_lines([found])
    assert found == read_line(saved, {})
    assert failure_text(found) == failure_text(RECORD)
    assert answer_lines([found], RunFacts()) == answer_lines([RECORD], RunFacts())


def test_texts_and_stages_have_what_a_feature_says() -> None:
    """The text of a failure has the details of a feature, and the stages have its parts."""
    lines = failure_text(COUNTED).splitlines()
    assert [line for line in lines if line not in failure_text(RECORD).splitlines()] == ["  counted 3"]
    assert dict(seconds_by_part(COUNTED)) == {**dict(seconds_by_part(RECORD)), "counting": 2.0}


def test_each_type_says_which_feature_and_test_it_belongs_to() -> None:
    """The type of what a feature adds has the feature's name, and the kind of one of the feature's tests."""
    tests: dict[str, tuple[SuiteTest, ...]] = {feature.name: feature.tests for feature in features()}
    for name, kind in added_types().items():
        assert (kind.feature, kind.kind in {test.kind for test in tests[name]}) == (name, True)


def test_without_a_feature_nothing_is_added() -> None:
    """A record that no feature has changed has nothing added, and its saved line does not name it."""
    plain: Record = record()
    (saved,) = compact_lines([plain])
    assert (plain.added, b"added" in saved) == ({}, False)
