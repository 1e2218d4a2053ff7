"""The table: one row per variant and shape, and no cell that claims more than was measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.variant import Arch
from pytest_fa.records.built import Advisory
from pytest_fa.records.judged import Bound, Check, Repeats
from pytest_fa.records.record import Outcome, Record
from pytest_fa.records.timing import ON_CPU
from pytest_fa.report.table import FOOTNOTE, HEADERS, NOTHING, Row, best_baseline_us, headline, make_rows, notes, render
from tests.factories import FLOPS, OK, OTHER, SHAPE, WRONG, build, check, record, speed


def only(*records: Record) -> Row:
    """The one row of these records."""
    (row,) = make_rows(list(records))
    return row


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_is_a_variant_on_a_shape() -> None:
    """Seeds and kinds of one variant and shape share a row; shapes come in the order of their first record."""
    records = [
        record("one", f"{SHAPE}-seed0"),
        record("one", f"{OTHER}-seed0"),
        record("two", f"{SHAPE}-seed0"),
        record("one", f"{SHAPE}-seed1"),
        record("one", f"{SHAPE}-seed0", "speed"),
        record("two", f"{OTHER}-seed0"),
    ]
    expected = [("one", SHAPE), ("two", SHAPE), ("one", OTHER), ("two", OTHER)]
    assert expected == [(row.variant, row.case) for row in make_rows(records)]


@pytest.mark.parametrize("role", ["baseline", "overhead"])
def test_companions_stand_below_candidates(role: str) -> None:
    """Whichever record arrives first, a shape's candidates come before its baselines and floors."""
    records = [record("beside", role=role), record("mine")]
    expected = ["mine", "beside"]
    assert expected == [row.variant for row in make_rows(records)]


def test_a_full_row_has_every_figure() -> None:
    """One row shows verdict, tightest bound, registers, spills, both times, throughput and the ratio to SDPA."""
    builds = (build("sm_90a", kernel=(168, 4, 8)),)
    row, _ = make_rows(
        [
            record(check=OK, builds=builds),
            record(kind="speed", check=OK, builds=builds, speed=speed(10.0, 14.5, ("kernel",))),
            record("sdpa", kind="speed", role="baseline", check=OK, speed=speed(8.0)),
        ]
    )
    tflops = f"{FLOPS / 10.0e-6 / 1e12:.2f}"
    expected = Row(
        "mine",
        SHAPE,
        "ok 2/2",
        "max 1.0e-03 / 4.0e-03",
        "168",
        "12",
        "10.00",
        NOTHING,
        "14.50",
        tflops,
        NOTHING,
        "1.250",
    )
    assert expected == row


def test_what_was_not_measured_is_a_dash() -> None:
    """A record without check, build or speed fills no cell but its name, shape and verdict."""
    assert Row("mine", SHAPE, "not judged", *[NOTHING] * 9) == only(record())


# -- verdict ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (("ok",), "ok 1/1"),
        (("ok", "ok", "ok"), "ok 3/3"),
        (("ok", "wrong", "ok"), "WRONG 1/3"),
        (("wrong", "wrong", "ok"), "WRONG 2/3"),
        (("launch_failed", "ok"), "LAUNCH FAILED 1/2"),
        (("not_built", "not_built"), "NOT BUILT 2/2"),
        (("crashed", "hung"), "CRASHED 2/2"),
    ],
)
def test_the_verdict_counts_what_was_judged(outcomes: tuple[Outcome, ...], verdict: str) -> None:
    """All right: how many; otherwise the first thing that went wrong, aloud, and how many did."""
    records = [
        record(case=f"{SHAPE}-seed{seed}", outcome=outcome, check={"ok": OK, "wrong": WRONG}.get(outcome))
        for seed, outcome in enumerate(outcomes)
    ]
    assert verdict == only(*records).verdict


def test_a_timing_without_a_check_is_not_judged() -> None:
    """A floor that was timed and never judged is not called ok."""
    row = only(record("noop", kind="speed", role="overhead", speed=speed(0.6)))
    expected = "not judged", "0.60"
    assert expected == (row.verdict, row.device_us)


def test_properties_are_counted() -> None:
    """Their case is in no suite, so nothing else is in its row."""
    assert only(record(kind="property"), record(kind="property")).verdict == "ok 2/2"
    assert only(record(kind="property"), record(kind="property", outcome="wrong")).verdict == "WRONG 1/2"


def test_an_unjudged_record_is_not_counted() -> None:
    """A record that came through without a check adds nothing to the count of those that have one."""
    assert only(record(check=OK), record(kind="speed", speed=speed(1.0))).verdict == "ok 1/1"


@pytest.mark.parametrize(
    ("checks", "error"),
    [
        ((), NOTHING),
        ((OK,), "max 1.0e-03 / 4.0e-03"),
        ((OK, check(Bound("rms", 0.003, 0.004, True)), OK), "rms 3.0e-03 / 4.0e-03"),
        ((check(Bound("rms", 0.003, 0.004, True)), WRONG), "max 8.0e-03 / 4.0e-03"),
        ((WRONG, check(Bound("rms", 0.9, 0.1, False))), "rms 9.0e-01 / 1.0e-01"),
        ((OK, check(Bound("max", None, 0.004, False))), "max not finite / 4.0e-03"),
        ((WRONG, check(Bound("max", None, 0.004, False))), "max not finite / 4.0e-03"),
        ((check(Bound("max", None, 0.004, False)), WRONG), "max not finite / 4.0e-03"),
        ((check(Bound("finite", 3.0, 0.0, False)), WRONG), "finite 3.0e+00 / 0.0e+00"),
    ],
)
def test_the_error_is_the_worst_bound_of_all(checks: tuple[Check, ...], error: str) -> None:
    """A broken bound before one that holds, then the larger used fraction; what is not finite is the worst of all."""
    records = [
        record(case=f"{SHAPE}-seed{seed}", check=each, outcome="ok" if each.passed else "wrong")
        for seed, each in enumerate(checks)
    ]
    assert error == only(*(records or [record()])).error


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baselines", "ratio"),
    [
        ([("flash", 8.0, "ok")], "1.250"),
        ([("flash", 8.0, "ok"), ("cudnn", 5.0, "ok")], "2.000"),
        ([("flash", 8.0, "ok"), ("cudnn", 5.0, "wrong")], "1.250"),
        ([("cudnn", 5.0, "wrong")], NOTHING),
        ([("cudnn", 5.0, "crashed")], NOTHING),
        ([("flash", 20.0, "ok")], "0.500"),
        ([], NOTHING),
    ],
)
def test_only_right_baselines_are_compared_with(baselines: list[tuple[str, float, Outcome]], ratio: str) -> None:
    """The ratio is to the fastest baseline whose output was right; without one there is none."""
    beside = [
        record(name, kind="speed", role="baseline", outcome=outcome, speed=speed(device_us))
        for name, device_us, outcome in baselines
    ]
    row = make_rows([record(kind="speed", check=OK, speed=speed(10.0)), *beside])[0]
    assert ("mine", ratio) == (row.variant, row.versus_baseline)


@pytest.mark.parametrize(
    ("role", "case"), [("candidate", f"{SHAPE}-seed0"), ("ablation", f"{SHAPE}-seed0"), ("baseline", f"{OTHER}-seed0")]
)
def test_only_baselines_of_the_same_shape_are_compared_with(role: str, case: str) -> None:
    """Neither another candidate nor a baseline on another shape stands in for SDPA."""
    beside = record("beside", case, "speed", role=role, check=OK, speed=speed(5.0))
    row = make_rows([record(kind="speed", check=OK, speed=speed(10.0)), beside])[0]
    expected = "mine", NOTHING
    assert expected == (row.variant, row.versus_baseline)


def test_the_best_baseline_is_named() -> None:
    """Name and time of the fastest right baseline, or None."""
    beside = [
        record(name, kind="speed", role="baseline", speed=speed(us)) for name, us in (("slow", 8.0), ("fast", 5.0))
    ]
    mine = record(kind="speed", speed=speed(1.0))
    expected = [("fast", 5.0), None]
    assert expected == [best_baseline_us([mine, *beside]), best_baseline_us([mine])]


def test_a_floor_has_times_and_no_throughput() -> None:
    """A floor does no work: no TFLOP/s and no ratio, though its times and SDPA's are known."""
    floor = record("noop", kind="speed", role="overhead", speed=speed(0.6, 4.0))
    beside = record("sdpa", kind="speed", role="baseline", check=OK, speed=speed(8.0))
    row = make_rows([floor, beside])[0]
    expected = ("noop", "0.60", "4.00", NOTHING, NOTHING)
    assert expected == (row.variant, row.device_us, row.call_us, row.tflops, row.versus_baseline)


def test_a_masked_case_counts_visible_work_only() -> None:
    """TFLOP/s of a causal case are those of the pairs that the mask shows."""
    row = only(record(case=f"{SHAPE}-causal-seed0", kind="speed", check=OK, speed=speed(10.0)))
    assert f"{4 * 8 * (512 * 513 // 2) * 64 / 10.0e-6 / 1e12:.2f}" == row.tflops


def test_a_failed_case_shows_no_time() -> None:
    """A wrong result carries no timing, and its row shows none."""
    row = only(record(outcome="wrong", check=WRONG), record(kind="speed", outcome="wrong", check=WRONG))
    assert {row.device_us, row.call_us, row.tflops, row.versus_baseline} == {NOTHING}


# -- resources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launched", "registers", "spills"), [((), "255", "36"), (("b",), "64", "12"), (("a", "b"), "255", "36")]
)
def test_resources_are_those_of_the_kernels_that_ran(launched: tuple[str, ...], registers: str, spills: str) -> None:
    """Largest registers and all spills of the launched kernels; of the whole build where launches were not read."""
    builds = (build("sm_90a", a=(255, 8, 16), b=(64, 4, 8)),)
    row = only(record(kind="speed", check=OK, builds=builds, speed=speed(10.0, launched=launched)))
    assert (registers, spills) == (row.registers, row.spills)


def test_a_variant_that_was_only_built_has_a_row_for_each_architecture() -> None:
    """Without a case there are no times, but registers and spills stand by architecture, above the cases."""
    built = record(
        "built", kind="build", builds=(build("sm_80", a=(96, 0, 0)), build("sm_90a", a=(168, 4, 8), b=(40, 0, 0)))
    )
    expected = [
        Row("built", "sm_80", "built", NOTHING, "96", "0", *[NOTHING] * 6),
        Row("built", "sm_90a", "built", NOTHING, "168", "12", *[NOTHING] * 6),
        Row("mine", SHAPE, "ok 1/1", "max 1.0e-03 / 4.0e-03", *[NOTHING] * 8),
    ]
    assert expected == make_rows([record(check=OK), built])


def test_a_build_that_failed_has_one_row() -> None:
    """A variant that compiled for no architecture still has its row, aloud."""
    row = only(record("bad", kind="build", outcome="not_built"))
    assert Row("bad", NOTHING, "NOT BUILT", *[NOTHING] * 9) == row


def test_a_build_beside_its_cases_has_no_row() -> None:
    """A variant that ran shows its resources there."""
    built = record(kind="build", builds=(build("sm_90a", a=(96, 0, 0)),))
    assert only(built, record(check=OK)).case == SHAPE


def test_no_records_make_no_rows() -> None:
    """An empty run has an empty table."""
    assert make_rows([]) == []


# -- notes ------------------------------------------------------------------------------------------------------------


def coded(variant: str, arch: Arch, identity: str | None, *advisories: Advisory) -> Record:
    """A build of `variant` with that machine code and these remarks."""
    made = msgspec.structs.replace(build(arch), variant=variant, code_identity=identity, advisories=advisories)
    return record(variant, kind="build", builds=(made,))


SERIAL = Advisory("C7511", "wgmma serialised")


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], []),
        ([coded("one", "sm_80", "a"), coded("two", "sm_80", "b")], []),
        ([coded("one", "sm_80", "a"), coded("one", "sm_90a", "a")], []),
        ([coded("one", "sm_80", "a"), coded("one", "sm_80", "a")], []),
        ([coded("one", "sm_80", None), coded("two", "sm_80", None)], []),
        ([coded("one", "sm_80", "a"), coded("two", "sm_80", "a")], ["same machine code for sm_80: one, two"]),
        ([coded("one", "sm_90a", "a", SERIAL)], ["ptxas: one/sm_90a: C7511 wgmma serialised"]),
        ([coded("one", "sm_90a", "a", SERIAL)] * 2, ["ptxas: one/sm_90a: C7511 wgmma serialised"]),
        (
            [coded("one", "sm_90a", "a"), coded("two", "sm_90a", "a", SERIAL)],
            ["ptxas: two/sm_90a: C7511 wgmma serialised", "same machine code for sm_90a: one, two"],
        ),
        ([record(repeats=Repeats(100, 0, 0, None, None))], []),
        ([record(repeats=Repeats(100, 0, 0, None, ON_CPU))], []),
        (
            [record(repeats=Repeats(100, 0, 0, None, "no cuda.bindings"))] * 2,
            ["judged without NaN-filled shared memory: no cuda.bindings"],
        ),
    ],
)
def test_the_notes_are_what_a_build_says_beside_its_figures(records: list[Record], expected: list[str]) -> None:
    """Each advisory once; variants whose code is known and the same for an architecture; nothing without a cause."""
    assert expected == notes(records)


# -- text -------------------------------------------------------------------------------------------------------------


LONG = Row(
    variant="ws_p2@BLOCK_M=64@BLOCK_N=128",
    case=f"{SHAPE}-causal_br-kv2",
    verdict="LAUNCH FAILED 100/101",
    error="row rms 1.0e-03 / 4.0e-03",
    registers="168",
    spills="1024",
    device_us="12345.67",
    cold_us="12350.12",
    call_us="12399.99",
    tflops="1234.56",
    of_limit="101.5",
    versus_baseline="12.345",
)


@pytest.mark.parametrize("width", [40, 132, 400])
def test_the_table_cuts_no_cell(width: int) -> None:
    """Every header and every cell stands in full on its line, however narrow the terminal is."""
    table = render([LONG], width, color=False)
    headers, row = (next(line for line in table.splitlines() if word in line) for word in ("variant", "ws_p2"))
    assert list(HEADERS) == [each for each in HEADERS if each in headers]
    cells = list(msgspec.structs.astuple(LONG))
    assert cells == [each for each in cells if each in row]


@pytest.mark.parametrize(("verdict", "is_red"), [("WRONG 1/3", True), ("ok 3/3", False), ("not judged", False)])
def test_what_went_wrong_is_red(verdict: str, *, is_red: bool) -> None:
    """On a terminal with colours a bad row is red, and no other."""
    row = Row("mine", SHAPE, verdict, *[NOTHING] * 9)
    assert is_red is ("\x1b[31m" in render([row], 132, color=True))


def test_without_colours_there_are_no_escapes() -> None:
    """A pipe gets plain text."""
    assert "\x1b" not in render([Row("mine", SHAPE, "WRONG 1/3", *[NOTHING] * 9)], 132, color=False)


@pytest.mark.parametrize("header", ["error / allowed", "device_us", "cold_us", "call_us", "% limit", "x baseline"])
def test_every_header_that_is_no_word_is_explained(header: str) -> None:
    """The footnote says what the table's own terms mean."""
    assert header in HEADERS
    assert f"{header}:" in FOOTNOTE


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "ok"),
        ({"check": OK}, "ok, error max 1.0e-03 / 4.0e-03"),
        (
            {"check": OK, "speed": speed(10.0, 14.5)},
            "ok, error max 1.0e-03 / 4.0e-03, device_us 10.00, call_us 14.50",
        ),
        ({"outcome": "wrong", "check": WRONG}, "wrong, error max 8.0e-03 / 4.0e-03"),
        ({"outcome": "hung"}, "hung"),
    ],
)
def test_a_headline_says_what_there_is(changes: dict[str, Any], text: str) -> None:
    """Outcome, error and times, each only where it was measured."""
    assert text == headline(record(**changes))
