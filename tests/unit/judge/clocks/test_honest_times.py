"""`python -m tests.honest_times`: which times agree, and the inputs that take turns."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.gpu.inputs import Output
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.timing import OutsideTime
from pytest_fa.wire.commands import Series
from pytest_fa.wire.jobs import CaseResult
from tests import honest_times
from tests.factories import speed
from tests.honest_cases import KERNELS
from tests.honest_times import (
    SETS,
    Pair,
    TakesTurns,
    Tally,
    add_clock_pair,
    add_clock_pairs,
    add_data_pairs,
    ends,
    pair_of_clocks,
    pair_of_data,
    row,
)

CASE = parse_case("b1h2s64d64-fp16-seed0")


@pytest.mark.parametrize(
    ("kind", "first_us", "second_us", "agrees"),
    [
        ("data", 100.4, 100.0, True),
        ("data", 100.6, 100.0, False),
        ("data", 99.45, 100.0, False),
        ("clocks", 100.0, 101.9, True),
        ("clocks", 100.0, 102.1, False),
        ("clocks", 2.0, 2.09, True),
        ("clocks", 2.0, 2.11, False),
        ("clocks", 2.0, 0.0, False),
        ("runs", 4000.0, 4320.05, True),
        ("runs", 4000.0, 4320.15, False),
        ("runs", 4000.0, 3921.0, True),
        ("runs", 4000.0, 3919.0, False),
    ],
)
def test_limits(kind: str, first_us: float, second_us: float, *, agrees: bool) -> None:
    """Data may make a difference of 0.5 %, clocks one of 2 % or 0.1 us.

    A run of ten calls may be 5 %, 0.1 us and a tenth of the 1.2 ms of its message longer, and 2 % shorter.
    """
    if kind == "data":
        pair = pair_of_data("ws_p2", CASE.id, first_us, second_us)
    elif kind == "clocks":
        pair = pair_of_clocks("ws_p2", CASE.id, first_us, OutsideTime(second_us, 0.001, 1.0, 10, proof_us=7.0))
    else:
        pair = pair_of_clocks("ws_p2", CASE.id, first_us, OutsideTime(1.0, 0.001, second_us, 10, proof_us=None))
    own_outputs_us = 7.0 if kind == "clocks" else None
    assert (pair.kind, pair.second_us, pair.own_outputs_us) == (kind, second_us, own_outputs_us)
    assert pair.agrees == agrees
    assert row(pair).endswith("DIFFERS") != agrees


def test_the_table_counts_what_agrees() -> None:
    """A row is said at once, one that differs is marked, each kind has a line, and what has no times is named."""
    said: list[str] = []
    tally = Tally(said.append)
    tally.add(pair_of_data("ws_p2", CASE.id, 101.0, 100.0))
    tally.add(Pair("clocks", "ws_p2", CASE.id, 100.0, 100.0, 102.0, 98.0, 104.0))
    tally.failed.append("clocks ws_p1: hung")
    tally.late.append("clocks minimal")
    data, clocks = said
    assert data.endswith("+0.99 %        -  DIFFERS")
    assert clocks.endswith("+0.00 %   +4.0 %")
    assert ends(tally) == [
        "data: 0 of 1 agree",
        "clocks: 1 of 1 agree",
        "NO TIMES: clocks ws_p1: hung",
        "no time left for: clocks minimal",
    ]


def test_times_that_are_missing_do_not_agree() -> None:
    """Nothing measured, or a variant without a time, is no success; a refused shape is none of these."""
    tally = Tally()
    assert not tally.agrees
    variant = discover((KERNELS,)).variants["reference"]
    add_clock_pair(tally, variant, CASE, CaseResult(Outcome.OK, "", (), speed=speed(100.0, call_us=120.0)))
    add_clock_pair(tally, variant, CASE, CaseResult(Outcome.UNSUPPORTED, "no", ()))
    assert (len(tally.pairs), tally.agrees) == (1, True)
    add_clock_pair(tally, variant, CASE, CaseResult(Outcome.HUNG, "no answer", ()))
    assert (tally.failed, tally.agrees) == ([f"clocks reference at {CASE.id}: hung: no answer"], False)


def test_what_no_time_is_left_for_is_named(snapshot: SnapshotAssertion) -> None:
    """After the time limit, each variant that is left is named, none is timed, and the result is no success."""
    tally, reference = Tally(), discover((KERNELS,)).variants["reference"]
    add_data_pairs(tally, [reference], {}, CASE, "cpu", -1.0)
    add_clock_pairs(tally, [reference], {}, [CASE], -1.0)
    assert snapshot == ends(tally)
    tally.add(pair_of_data("ws_p2", CASE.id, 100.0, 100.0))
    assert not tally.agrees


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--only=refrence",), "--only: no variant 'refrence'; did you mean 'reference'?"),
        (("--cases=",), "--cases: "),
        (("--cases=b1h2",), "--cases: "),
    ],
)
def test_a_wrong_word_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    """An unknown variant or case is named, also on a machine without a GPU."""
    monkeypatch.setattr(sys, "argv", ["honest_times", *words])
    with pytest.raises(SystemExit):
        honest_times.main()
    assert problem in capsys.readouterr().err


def test_a_variant_that_cannot_be_timed_is_named() -> None:
    """The others are measured all the same."""
    tally = Tally()
    broken = msgspec.structs.replace(discover((KERNELS,)).variants["reference"], folder=Path("/nowhere"))
    add_data_pairs(tally, [broken], {}, CASE, "cpu", 60.0)
    assert [text.partition(":")[0] for text in tally.failed] == ["data reference"]


def test_sets_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call i reads set i modulo 8; the sets do not overlap, and both kinds of data are timed."""
    kept: list[Series] = []

    class Keeps(TakesTurns):
        """Keeps the series that it makes."""

        def series(self, count: int, outs: list[Output] | None = None) -> Series:
            """A series, which is kept."""
            kept.append(super().series(count, outs))
            return kept[-1]

    monkeypatch.setattr(honest_times, "ROUNDS", 1)
    monkeypatch.setattr(honest_times, "TakesTurns", Keeps)
    reference = discover((KERNELS,)).variants["reference"]

    tally = Tally()
    add_data_pairs(tally, [reference], {}, CASE, "cpu", 60.0)

    (pair,) = tally.pairs
    assert (pair.kind, pair.variant, pair.first_us > 0, pair.second_us > 0) == ("data", "reference", True, True)
    longest = max((series.shifts for series in kept), key=len)
    elements = 2 * 64 * 64
    assert longest == tuple((index % SETS * elements,) * 3 for index in range(len(longest)))
