"""Records survive their JSON, and a number that was not measured never comes back as one that passes."""

from __future__ import annotations

import json
import math
from typing import get_args

import msgspec
import pytest

from pytest_fa.records.judged import Bound
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Outcome, Record, to_builtins, to_json
from pytest_fa.records.timing import Timing
from tests.factories import BARE, CHECK, KERNEL, RECORD, SPEED


@pytest.mark.parametrize("record", [RECORD, BARE], ids=["full", "bare"])
def test_a_record_survives_its_line(record: Record) -> None:
    """What is written as a line reads back equal, field by field, from bytes and from text."""
    line = to_json(record)
    assert [record, record] == [read_record(line), read_record(line.decode())]


@pytest.mark.parametrize("record", [RECORD, BARE], ids=["full", "bare"])
def test_a_record_survives_the_test_report(record: Record) -> None:
    """What travels on a test report is plain JSON data, which any serializer carries, and reads back equal."""
    carried = json.loads(json.dumps(to_builtins(record), allow_nan=False))
    assert record == read_record(carried)


def test_a_record_is_one_line() -> None:
    """No message, however long or many-lined, breaks the line that a record is."""
    assert len(to_json(RECORD).splitlines()) == 1


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_every_outcome_can_be_written(outcome: Outcome) -> None:
    """No outcome is lost between its word and its line."""
    assert outcome == read_record(to_json(msgspec.structs.replace(RECORD, outcome=outcome))).outcome


@pytest.mark.parametrize(
    ("field", "value"), [("outcome", "great"), ("kind", "guess"), ("stages", "build"), ("case", "b1h8s512d64-fp16")]
)
def test_a_wrong_field_is_not_read(field: str, value: object) -> None:
    """A line that says what no record can say is refused, not bent into one."""
    with pytest.raises(msgspec.ValidationError):
        read_record({**to_builtins(RECORD), field: value})


LATER = ("nsight", "sanitized", "ablation")  # younger than records that are kept: absent there, and None


def test_an_older_record_has_no_profile() -> None:
    """What was written before profiles were recorded still reads, and says that there is none."""
    told = {key: value for key, value in to_builtins(RECORD).items() if key not in LATER}
    assert read_record(told) == msgspec.structs.replace(RECORD, nsight=None, sanitized=None, ablation=None)


@pytest.mark.parametrize("field", [field for field in Record.__struct_fields__ if field not in ("schema", *LATER)])
def test_a_missing_field_is_not_made_up(field: str) -> None:
    """A line without one of a record's fields is refused: nothing stands in for what is not there."""
    told = {key: value for key, value in to_builtins(RECORD).items() if key != field}
    with pytest.raises(msgspec.ValidationError, match=field):
        read_record(told)


# -- numbers that are none --------------------------------------------------------------------------------------------

NO_NUMBERS = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_an_error_that_is_no_number_is_missing_in_the_line(value: float) -> None:
    """An error figure that is NaN or Inf is written as missing, and its bound stays broken and unused."""
    bound = Bound("max", value, 0.01, False)
    check = msgspec.structs.replace(CHECK, bounds=(bound,), max_abs_error=value, rms_error=value, worst_got=value)
    read = read_record(to_json(msgspec.structs.replace(RECORD, check=check))).check
    assert read is not None
    expected = Bound("max", None, 0.01, False)
    assert (expected, None) == (read.tightest, read.tightest.used)
    assert {read.max_abs_error, read.rms_error, read.worst_got} == {None}


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_time_that_is_no_number_is_not_read(value: float) -> None:
    """A line whose time is NaN or Inf gives no record, so the time can never stand in a table or a comparison."""
    speed = msgspec.structs.replace(SPEED, device=Timing("graph replay", (value,), value, 20))
    with pytest.raises(msgspec.ValidationError, match=r"speed\.device"):
        read_record(to_json(msgspec.structs.replace(RECORD, speed=speed)))


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_limit_that_is_no_number_is_not_read(value: float) -> None:
    """A line whose bound allows NaN or Inf gives no record, so nothing is ever judged against it."""
    check = msgspec.structs.replace(CHECK, bounds=(Bound("max", 0.01, value, True),))
    with pytest.raises(msgspec.ValidationError, match=r"check\.bounds"):
        read_record(to_json(msgspec.structs.replace(RECORD, check=check)))


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_the_test_report_makes_no_number_of_what_is_none(value: float) -> None:
    """On the way through a test report an error of NaN or Inf stays one, or goes missing; its bound stays broken."""
    check = msgspec.structs.replace(CHECK, bounds=(Bound("max", value, 0.01, False),))
    read = read_record(to_builtins(msgspec.structs.replace(RECORD, check=check))).check
    assert read is not None
    bound = read.tightest
    assert not bound.holds
    assert bound.value is None or not math.isfinite(bound.value)


# -- figures that a record derives ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "used"),
    [
        (Bound("max", 0.5, 2.0, True), 0.25),
        (Bound("max", 2.0, 2.0, True), 1.0),
        (Bound("max", 3.0, 2.0, False), 1.5),
        (Bound("max", None, 2.0, False), None),
        (Bound("finite", 0.0, 0.0, True), 0.0),
        (Bound("finite", 3.0, 0.0, False), math.inf),
    ],
)
def test_used_is_the_fraction_of_the_bound(bound: Bound, used: float | None) -> None:
    """1.0 is the edge; a bound of zero is unused or infinitely overused; what is not finite has no fraction."""
    assert used == bound.used


@pytest.mark.parametrize(
    ("bounds", "name"),
    [
        ((Bound("a", 0.1, 1.0, True), Bound("b", 0.9, 1.0, True), Bound("c", 0.5, 1.0, True)), "b"),
        ((Bound("a", 0.9, 1.0, True), Bound("b", 0.2, 0.1, False)), "b"),
        ((Bound("a", 0.9, 1.0, True), Bound("b", None, 1.0, False)), "b"),
        ((Bound("a", 2.0, 1.0, False), Bound("b", 9.0, 1.0, False)), "a"),
        ((Bound("a", 0.1, 1.0, True), Bound("b", 9.0, 1.0, False, judged=False)), "a"),
        ((Bound("finite", 0.0, 0.0, True), Bound("b", 0.2, 1.0, True)), "b"),
    ],
)
def test_the_tightest_bound_broke_or_is_nearest_to_it(bounds: tuple[Bound, ...], name: str) -> None:
    """The first broken bound, else the one with the largest used fraction; one that is not judged is never it."""
    assert name == msgspec.structs.replace(CHECK, bounds=bounds).tightest.name


def test_spills_are_stores_and_loads() -> None:
    """A kernel's spilled bytes are those stored and those loaded."""
    assert KERNEL.spill_bytes == 4 + 8
