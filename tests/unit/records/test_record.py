"""Records are read back equal from JSON, and a number that was not measured never becomes one that passes."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec
import pytest

from pytest_fa.records.checks import Bound
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_builtins, to_json
from pytest_fa.records.timing import Timing
from tests.factories import BARE, CHECK, KERNEL, RECORD, SPEED


@pytest.mark.parametrize("record", [RECORD, BARE], ids=["full", "bare"])
def test_a_record_is_read_back_equal(record: Record) -> None:
    """A record's line, as bytes or text, is read back as an equal record."""
    line = to_json(record)
    assert [record, record] == [read_record(line), read_record(line.decode())]


@pytest.mark.parametrize("record", [RECORD, BARE], ids=["full", "bare"])
def test_a_record_passes_through_a_test_report(record: Record) -> None:
    """The builtins of a record are plain JSON data, which are read back as an equal record."""
    received = json.loads(json.dumps(to_builtins(record), allow_nan=False))
    assert record == read_record(received)


def test_a_record_is_one_line() -> None:
    """A record with a multi-line message is still one line."""
    assert len(to_json(RECORD).splitlines()) == 1


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_can_be_written(outcome: Outcome) -> None:
    """Each outcome is read back from its line."""
    assert outcome == read_record(to_json(msgspec.structs.replace(RECORD, outcome=outcome))).outcome


@pytest.mark.parametrize(
    ("field", "value"), [("outcome", "great"), ("kind", "guess"), ("stages", "build"), ("case", "b1h8s512d64-fp16")]
)
def test_a_wrong_value_is_refused(field: str, value: object) -> None:
    """A line with a value that a field does not allow is refused."""
    with pytest.raises(msgspec.ValidationError):
        read_record({**to_builtins(RECORD), field: value})


# Fields that were added after the first saved records, which lack them, and what is read in their place.
LATER: dict[str, object] = {"other_plugins": (), "is_claim": False, "machine": None} | {
    "added": {},
    "ablation": None,
    "fingerprints": None,
    "output": "",
    "costs": None,
    "unprotected": "",
    "compile_seconds": 0.0,
    "sources": {},
    "own_tolerance": "",
    "reference": None,
    "workspace_bytes": None,
    "peak_bytes": None,
}


def test_a_record_without_the_later_fields_is_read() -> None:
    """A record that was written before these fields existed is read, with the default of each."""
    content = {key: value for key, value in to_builtins(RECORD).items() if key not in LATER}
    assert read_record(content) == msgspec.structs.replace(RECORD, **LATER)


@pytest.mark.parametrize("field", [field for field in Record.__struct_fields__ if field not in ("schema", *LATER)])
def test_a_missing_field_is_refused(field: str) -> None:
    """A line without a required field is refused with the name of that field."""
    content = {key: value for key, value in to_builtins(RECORD).items() if key != field}
    with pytest.raises(msgspec.ValidationError, match=field):
        read_record(content)


# -- NaN and infinity -------------------------------------------------------------------------------------------------

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_error_that_is_not_finite_is_none(value: float) -> None:
    """An error of NaN or Inf is written as null; its bound still does not hold, and its used fraction is None."""
    bound = Bound("max", value, 0.01, False)
    check = msgspec.structs.replace(CHECK, bounds=(bound,), max_abs_error=value, rms_error=value, worst_got=value)
    received = read_record(to_json(msgspec.structs.replace(RECORD, check=check))).check
    assert received is not None
    expected = Bound("max", None, 0.01, False)
    assert (expected, None) == (received.tightest, received.tightest.used)
    assert {received.max_abs_error, received.rms_error, received.worst_got} == {None}


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_time_that_is_not_finite_is_refused(value: float) -> None:
    """A line whose time was NaN or Inf is refused, so this time is never in a table or comparison."""
    speed = msgspec.structs.replace(SPEED, device=Timing("graph replay", (value,), value, 20))
    with pytest.raises(msgspec.ValidationError, match=r"speed\.device"):
        read_record(to_json(msgspec.structs.replace(RECORD, speed=speed)))


@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_allowed_value_that_is_not_finite_is_refused(value: float) -> None:
    """A line with a bound that allows NaN or Inf is refused, so nothing is judged by it."""
    check = msgspec.structs.replace(CHECK, bounds=(Bound("max", 0.01, value, True),))
    with pytest.raises(msgspec.ValidationError, match=r"check\.bounds"):
        read_record(to_json(msgspec.structs.replace(RECORD, check=check)))


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_test_report_keeps_an_error_that_is_not_finite(value: float) -> None:
    """After a test report, an error of NaN or Inf is still not finite or None, and its bound does not hold."""
    check = msgspec.structs.replace(CHECK, bounds=(Bound("max", value, 0.01, False),))
    received = read_record(to_builtins(msgspec.structs.replace(RECORD, check=check))).check
    assert received is not None
    bound = received.tightest
    assert not bound.holds
    assert bound.value is None or not math.isfinite(bound.value)


# -- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("speed.device.median_us", 1e308),
        ("speed.device.median_us", 0.0),
        ("speed.device.median_us", None),
        ("speed.device.samples_us.0", -1.0),
        ("speed.device.samples_us.2", 1e12),
        ("speed.call.calls_per_sample", -1),
        ("speed.launches.0.grid.0", 2**60),
        ("speed.clocks_before.power_watts", 1e308),
        ("stages.0.seconds", -0.5),
        ("builds.0.kernels.0.registers_per_thread", -1),
        ("builds.0.kernels.0.instructions.HGMMA", 10**40),
        ("check.max_abs_error", 1e308),
        ("check.bounds", []),
        ("check.bad_count", -1),
        ("repeats.first.3", -1),
        ("case.seq_q", 0),
        ("case.batch", 2**31),
        ("id", ""),
        ("variant", "v" * 1001),
    ],
)
def test_a_value_out_of_range_is_refused(path: str, value: object) -> None:
    """A record with an impossible time, count or size is refused with the path of that value."""
    *parents, last = path.split(".")
    content = part = to_builtins(RECORD)
    for name in parents:
        part = part[int(name) if name.isdigit() else name]
    part[int(last) if last.isdigit() else last] = value
    with pytest.raises(msgspec.ValidationError, match=re.escape(f"at `$.{path.split('.', maxsplit=1)[0]}")):
        read_record(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_heads": 3}, "8 heads cannot share 3 key/value heads evenly"),
        ({"computes": "scores"}, "scores have no mask; drop -causal"),
    ],
)
def test_an_impossible_case_is_refused(change: dict[str, Any], reason: str) -> None:
    """A record whose case has values that do not fit together is refused with the reason."""
    content = to_builtins(RECORD)
    with pytest.raises(msgspec.ValidationError, match=reason):
        read_record({**content, "case": {**content["case"], **change}})


@pytest.mark.parametrize("kind", ["correct", "property", "speed", "profile", "sanitize"])
def test_a_missing_case_is_refused(kind: str) -> None:
    """A record of a kind that has a case is refused without one."""
    with pytest.raises(msgspec.ValidationError, match=f"^a record of kind {kind} has no case$"):
        read_record({**to_builtins(BARE), "kind": kind})


def test_a_time_without_a_case_is_refused() -> None:
    """A record with a time is refused without a case, whatever its kind."""
    with pytest.raises(msgspec.ValidationError, match=r"^a record of kind gate has no case$"):
        read_record({**to_builtins(RECORD), "kind": "gate", "case": None})


# -- derived figures -------------------------------------------------------------------------------------------------


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
    """`used` is value / allowed; 0 or inf if nothing is allowed; None if the value is not finite."""
    assert used == bound.used


@pytest.mark.parametrize(
    ("bounds", "name"),
    [
        ((Bound("a", 0.1, 1.0, True), Bound("b", 0.9, 1.0, True), Bound("c", 0.5, 1.0, True)), "b"),
        ((Bound("a", 0.9, 1.0, True), Bound("b", 0.2, 0.1, False)), "b"),
        ((Bound("a", 0.9, 1.0, True), Bound("b", None, 1.0, False)), "b"),
        ((Bound("a", 2.0, 1.0, False), Bound("b", 9.0, 1.0, False)), "a"),
        ((Bound("a", 0.1, 1.0, True), Bound("b", 9.0, 1.0, False, enforced=False)), "a"),
        ((Bound("finite", 0.0, 0.0, True), Bound("b", 0.2, 1.0, True)), "b"),
    ],
)
def test_the_tightest_bound_is_broken_or_most_used(bounds: tuple[Bound, ...], name: str) -> None:
    """The tightest bound is the first broken one, else the most used one; bounds that are not judged are ignored."""
    assert name == msgspec.structs.replace(CHECK, bounds=bounds).tightest.name


def test_spills_are_stores_and_loads() -> None:
    """`spill_bytes` is the sum of the bytes of spill stores and spill loads."""
    assert KERNEL.spill_bytes == 4 + 8
