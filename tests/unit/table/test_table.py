"""The table: one row for each variant and shape, and `-` for everything that was not measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.variant import Arch
from pytest_fa.records.built import Advisory
from pytest_fa.records.checks import Bound, Check, Repeats
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU, Speed, Timing
from pytest_fa.table.baselines import best_baseline
from pytest_fa.table.rows import (
    NOTHING,
    Row,
    age_text,
    claim_lines,
    headline,
    make_groups,
    make_rows,
    notes,
    property_lines,
)
from tests.factories import FLOPS, OK, SHAPE, SMALL_SHAPE, WRONG, build, check, record, speed


def on_cpu(device_us: float, threads: int | None = 1, spread: float = 0.0) -> Speed:
    """A time on the CPU with this median; its samples differ by `spread`, a share of it."""
    samples = tuple(device_us * (1 + spread * step) for step in (-0.5, -0.5, 0.0, 0.5, 0.5))
    timing = Timing("wall clock", samples, device_us, 1)
    changes = {"device": timing, "call": timing, "cold_missing": ON_CPU, "cpu_threads": threads}
    return msgspec.structs.replace(speed(device_us), **changes)


def only(*records: Record) -> Row:
    """The single row of these records."""
    (row,) = make_rows(list(records))
    return row


def row_of(variant: str, records: list[Record]) -> Row:
    """The first row of this variant."""
    return next(row for row in make_rows(records) if row.variant == variant)


def test_a_shape_in_e4m3_is_compared_with_the_baseline_in_fp16(snapshot: SnapshotAssertion) -> None:
    """SDPA has no e4m3: its time in fp16 stands under its own shape, and the heading of the e4m3 shape says so."""
    shape = "b1h2s64d64-{}-seed0"
    records = [
        record("mine", shape.format("e4m3"), "speed", check=OK, speed=speed(5.0)),
        record("sdpa", shape.format("fp16"), "speed", role="baseline", check=OK, speed=speed(10.0)),
    ]
    groups = make_groups(records)
    assert snapshot == [group.heading for group in groups]
    assert [(row.variant, row.versus_baseline) for group in groups for row in group.rows] == [
        ("mine", "0.500"),
        ("sdpa", "1.000"),
    ]


def test_a_baseline_in_e4m3_comes_before_sdpa(snapshot: SnapshotAssertion) -> None:
    """A baseline in e4m3 is compared also where it writes another dtype; SDPA only where there is none in e4m3."""
    records = [
        record("mine", "b1h2s64d64-e4m3-seed0", "speed", check=OK, speed=speed(5.0)),
        record("fa3", "b1h2s64d64-e4m3-out_bf16-seed0", "speed", role="baseline", check=OK, speed=speed(8.0)),
        record("sdpa", "b1h2s64d64-fp16-seed0", "speed", role="baseline", check=OK, speed=speed(4.0)),
    ]
    groups = make_groups(records)
    assert snapshot == [group.heading for group in groups]
    assert [row.versus_baseline for group in groups for row in group.rows] == ["0.625", "1.000", "1.000"]


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_is_a_variant_on_a_shape() -> None:
    """All seeds and kinds of one variant and shape share a row; shapes are in the order of their first record."""
    records = [
        record("one", f"{SHAPE}-seed0"),
        record("one", f"{SMALL_SHAPE}-seed0"),
        record("two", f"{SHAPE}-seed0"),
        record("one", f"{SHAPE}-seed1"),
        record("one", f"{SHAPE}-seed0", "speed"),
        record("two", f"{SMALL_SHAPE}-seed0"),
    ]
    expected = [("one", SHAPE), ("two", SHAPE), ("one", SMALL_SHAPE), ("two", SMALL_SHAPE)]
    assert expected == [(row.variant, row.case) for row in make_rows(records)]


def test_the_fastest_is_first() -> None:
    """At each shape candidates and baselines are sorted by their time; what is wrong or not timed follows.

    Kernels that do not compute all of attention are last.
    """
    records = [
        record("noop", kind="speed", role="overhead", speed=speed(1.0)),
        record("ablation", kind="speed", role="ablation", check=OK, speed=speed(2.0)),
        record("untimed", check=OK),
        record("wrong", outcome=Outcome.WRONG, check=WRONG),
        record("wrong", kind="speed", check=OK, speed=speed(3.0)),
        record("slow", kind="speed", check=OK, speed=speed(30.0)),
        record("sdpa", kind="speed", role="baseline", check=OK, speed=speed(20.0)),
        record("fast", kind="speed", check=OK, speed=speed(10.0)),
    ]
    expected = ["fast", "sdpa", "slow", "wrong", "untimed", "noop", "ablation"]
    assert expected == [row.variant for row in make_rows(records)]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([speed(8.0), speed(4.0)], f"{SHAPE} (baseline: sdpa1)"),
        ([on_cpu(8.0, threads=1)], f"{SHAPE} (CPU, 1 thread; baseline: sdpa0)"),
        ([on_cpu(8.0, threads=1), on_cpu(9.0, threads=4)], f"{SHAPE} (CPU, 1 or 4 threads; baseline: sdpa0)"),
        ([on_cpu(8.0, threads=None)], f"{SHAPE} (CPU; baseline: sdpa0)"),
        ([], SHAPE),
    ],
)
def test_a_heading_says_what_a_shape_has_in_common(speeds: list[Speed], expected: str) -> None:
    """The heading has the shape, the number of CPU threads, and the baseline that ratios refer to."""
    records = [record(f"sdpa{index}", kind="speed", role="baseline", speed=each) for index, each in enumerate(speeds)]
    (group,) = make_groups([record(check=OK), *records])
    assert (group.heading, group.kind) == (expected, "shape")


def test_a_full_row_has_every_figure() -> None:
    """A row shows the checks, the tightest bound, registers, spills, both times, throughput and the ratio to SDPA."""
    builds = (build("sm_90a", kernel=(168, 4, 8)),)
    _, row = make_rows(
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
    """A record without check, build and speed fills only the cells for name, shape and checks."""
    assert Row("mine", SHAPE, "not checked", *[NOTHING] * 9) == only(record())


def test_memory_is_shown_where_a_call_needs_some() -> None:
    """The largest peak of a row is rounded up to KiB; a peak of 0 is shown beside others, and not where all are 0."""
    large = [record(peak_bytes=1), record(case=f"{SHAPE}-seed1", peak_bytes=2049)]
    none = record("none", peak_bytes=0)
    assert {row.variant: row.peak for row in make_rows([*large, none, record("old")])} == {
        "mine": "3",
        "none": "0",
        "old": NOTHING,
    }
    assert only(none).peak == NOTHING


# -- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "checks"),
    [
        ((Outcome.OK,), "ok 1/1"),
        ((Outcome.OK, Outcome.OK, Outcome.OK), "ok 3/3"),
        ((Outcome.OK, Outcome.WRONG, Outcome.OK), "WRONG 1/3"),
        ((Outcome.WRONG, Outcome.WRONG, Outcome.OK), "WRONG 2/3"),
        ((Outcome.LAUNCH_FAILED, Outcome.OK), "LAUNCH FAILED 1/2"),
        ((Outcome.NOT_BUILT, Outcome.NOT_BUILT), "NOT BUILT"),
        ((Outcome.CRASHED, Outcome.HUNG), "CRASHED 2/2"),
    ],
)
def test_the_checks_are_counted(outcomes: tuple[Outcome, ...], checks: str) -> None:
    """`checks` is `ok` with the number of runs, or the first failure in capitals with the number of failures.

    A variant that was not built has no run to count.
    """
    records = [
        record(case=f"{SHAPE}-seed{seed}", outcome=outcome, check={Outcome.OK: OK, Outcome.WRONG: WRONG}.get(outcome))
        for seed, outcome in enumerate(outcomes)
    ]
    assert checks == only(*records).checks


def test_a_timing_without_a_check_is_not_judged() -> None:
    """A variant of role `overhead`, which is timed and never judged, is not called ok."""
    row = only(record("noop", kind="speed", role="overhead", speed=speed(0.6)))
    expected = "not checked", "0.60"
    assert expected == (row.checks, row.device_us)


def test_properties_are_counted() -> None:
    """A property that does not hold is counted in `checks`, beside the other checks of its shape."""
    assert only(record(check=OK), record(kind="property")).checks == "ok 2/2"
    assert only(record(kind="property"), record(kind="property", outcome=Outcome.WRONG)).checks == "WRONG 1/2"


def test_properties_that_hold_have_one_line() -> None:
    """Properties that hold have no row, but a line that counts those of all variants."""
    records = [record("one", kind="property"), record("two", kind="property")]
    assert (make_rows(records), property_lines(records)) == ([], ["properties: 2 of 2 hold"])
    assert property_lines([record(), record(kind="property", outcome=Outcome.WRONG)]) == ["properties: 0 of 1 hold"]
    assert property_lines([record()]) == []


def test_claims_that_hold_are_one_line(snapshot: SnapshotAssertion) -> None:
    """A right output at a case of a claim has no row, a wrong one has; a line below the table counts both."""
    right, wrong = record(is_claim=True), record("mine", "b2h4s150d64-bf16-seed0", is_claim=True, outcome=Outcome.WRONG)
    assert (make_rows([right]), [row.case for row in make_rows([right, wrong])]) == ([], ["b2h4s150d64-bf16"])
    assert snapshot == claim_lines([right, wrong])
    assert claim_lines([record()]) == []


def test_a_property_that_was_not_tested_is_not_counted() -> None:
    """The properties of a variant that could not be built are not counted among those that were tested."""
    not_built = [record("bad", kind="property", outcome=Outcome.NOT_BUILT)] * 3
    assert property_lines([record(kind="property"), *not_built]) == ["properties: 1 of 1 hold"]
    assert property_lines(not_built) == []


def test_an_unjudged_record_is_not_counted() -> None:
    """A record without a check is not counted in `checks`."""
    assert only(record(check=OK), record(kind="speed", speed=speed(1.0))).checks == "ok 1/1"


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
    """The worst bound is one that is not finite, else a broken one, else the one with the largest used fraction."""
    records = [
        record(case=f"{SHAPE}-seed{seed}", check=each, outcome=Outcome.OK if each.passed else Outcome.WRONG)
        for seed, each in enumerate(checks)
    ]
    assert error == only(*(records or [record()])).error


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baselines", "ratio"),
    [
        ([("flash", 8.0, "ok")], "1.250"),
        ([("flash", 8.0, Outcome.OK), ("cudnn", 5.0, Outcome.OK)], "2.000"),
        ([("flash", 8.0, Outcome.OK), ("cudnn", 5.0, Outcome.WRONG)], "1.250"),
        ([("cudnn", 5.0, Outcome.WRONG)], NOTHING),
        ([("cudnn", 5.0, Outcome.CRASHED)], NOTHING),
        ([("flash", 20.0, Outcome.OK)], "0.500"),
        ([], NOTHING),
    ],
)
def test_only_right_baselines_are_compared_with(baselines: list[tuple[str, float, Outcome]], ratio: str) -> None:
    """The ratio compares with the fastest correct baseline; without a correct baseline there is no ratio."""
    baseline_records = [
        record(name, kind="speed", role="baseline", outcome=outcome, speed=speed(device_us))
        for name, device_us, outcome in baselines
    ]
    row = row_of("mine", [record(kind="speed", check=OK, speed=speed(10.0)), *baseline_records])
    assert ("mine", ratio) == (row.variant, row.versus_baseline)


@pytest.mark.parametrize(
    ("role", "case"),
    [("candidate", f"{SHAPE}-seed0"), ("ablation", f"{SHAPE}-seed0"), ("baseline", f"{SMALL_SHAPE}-seed0")],
)
def test_only_baselines_of_the_same_shape_are_compared_with(role: str, case: str) -> None:
    """The ratio compares neither with another candidate nor with a baseline at another shape."""
    unrelated = record("unrelated", case, "speed", role=role, check=OK, speed=speed(5.0))
    row = row_of("mine", [record(kind="speed", check=OK, speed=speed(10.0)), unrelated])
    expected = "mine", NOTHING
    assert expected == (row.variant, row.versus_baseline)


def test_the_best_baseline_is_named() -> None:
    """`best_baseline` gives the record of the fastest correct baseline, or None."""
    baselines = [
        record(name, kind="speed", role="baseline", speed=speed(us)) for name, us in (("slow", 8.0), ("fast", 5.0))
    ]
    candidate = record(kind="speed", speed=speed(1.0))
    expected = [baselines[1], None]
    assert expected == [best_baseline([candidate, *baselines]), best_baseline([candidate])]


def test_a_time_on_the_cpu_is_no_baseline_of_times_on_the_gpu() -> None:
    """Among times on the GPU, the best baseline is one on the GPU, and a time on the CPU has no ratio to it."""
    records = [
        record(kind="speed", check=OK, speed=speed(10.0)),
        record("sdpa_gpu", kind="speed", role="baseline", speed=speed(8.0)),
        record("sdpa_cpu", kind="speed", role="baseline", speed=on_cpu(1.0)),
    ]
    ratios = {row.variant: row.versus_baseline for row in make_rows(records)}
    assert (best_baseline(records), best_baseline(records[::2])) == (records[1], None)
    assert ratios == {"mine": "1.250", "sdpa_gpu": "1.000", "sdpa_cpu": NOTHING}


def test_overhead_has_times_and_no_throughput() -> None:
    """A variant of role `overhead` computes nothing, so it has times but no TFLOP/s and no ratio."""
    noop = record("noop", kind="speed", role="overhead", speed=speed(0.6, 4.0))
    baseline = record("sdpa", kind="speed", role="baseline", check=OK, speed=speed(8.0))
    row = row_of("noop", [noop, baseline])
    expected = ("noop", "0.60", "4.00", NOTHING, NOTHING)
    assert expected == (row.variant, row.device_us, row.call_us, row.tflops, row.versus_baseline)


def test_a_masked_case_counts_visible_work_only() -> None:
    """TFLOP/s of a causal case count only the query-key pairs that the mask keeps."""
    row = only(record(case=f"{SHAPE}-causal-seed0", kind="speed", check=OK, speed=speed(10.0)))
    assert f"{4 * 8 * (512 * 513 // 2) * 64 / 10.0e-6 / 1e12:.2f}" == row.tflops


def test_a_failed_case_shows_no_time() -> None:
    """The row of a wrong result shows no time."""
    row = only(record(outcome=Outcome.WRONG, check=WRONG), record(kind="speed", outcome=Outcome.WRONG, check=WRONG))
    assert {row.device_us, row.call_us, row.tflops, row.versus_baseline} == {NOTHING}


# -- resources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launched", "registers", "spills"), [((), "255", "36"), (("b",), "64", "12"), (("a", "b"), "255", "36")]
)
def test_resources_are_those_of_the_kernels_that_ran(launched: tuple[str, ...], registers: str, spills: str) -> None:
    """Registers are the maximum and spills the sum over the launched kernels, or over all if launches are unknown."""
    builds = (build("sm_90a", a=(255, 8, 16), b=(64, 4, 8)),)
    row = only(record(kind="speed", check=OK, builds=builds, speed=speed(10.0, launched=launched)))
    assert (registers, spills) == (row.registers, row.spills)


def test_a_variant_that_was_only_built_has_a_row_for_each_architecture() -> None:
    """A variant without cases has one row for each architecture, with registers and spills, above the cases."""
    built = record(
        "built", kind="build", builds=(build("sm_80", a=(96, 0, 0)), build("sm_90a", a=(168, 4, 8), b=(40, 0, 0)))
    )
    expected = [
        Row("built", "sm_80", "built", registers="96", spills="0", smem="0", build_seconds="1.0"),
        Row("built", "sm_90a", "built", registers="168", spills="12", smem="0", build_seconds="1.0"),
        Row("mine", SHAPE, "ok 1/1", "max 1.0e-03 / 4.0e-03", *[NOTHING] * 8),
    ]
    assert expected == make_rows([record(check=OK), built])


def test_a_build_that_failed_has_one_row() -> None:
    """A variant that compiled for no architecture has one row, with its outcome in capitals."""
    row = only(record("bad", kind="build", outcome=Outcome.NOT_BUILT))
    assert Row("bad", NOTHING, "NOT BUILT", *[NOTHING] * 9) == row


def test_a_build_beside_its_cases_has_no_row() -> None:
    """The build of a variant with cases has no row of its own."""
    built = record(kind="build", builds=(build("sm_90a", a=(96, 0, 0)),))
    assert only(built, record(check=OK)).case == SHAPE


def test_no_records_make_no_rows() -> None:
    """Without records there are no rows."""
    assert make_rows([]) == []


# -- notes ------------------------------------------------------------------------------------------------------------


def coded(variant: str, arch: Arch, identity: str | None, *advisories: Advisory) -> Record:
    """The record of a build of `variant` with this machine code and these ptxas advisories."""
    built = msgspec.structs.replace(build(arch), variant=variant, code_identity=identity, advisories=advisories)
    return record(variant, kind="build", builds=(built,))


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
def test_notes(records: list[Record], expected: list[str]) -> None:
    """The notes list each advisory once, variants with the same machine code, and missing NaN-filled shared memory."""
    assert expected == notes(records)


# -- the CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "baseline", "device_us", "ratio"),
    [
        (on_cpu(20.0), on_cpu(10.0), "20.00", "2.00"),
        (on_cpu(20.0, spread=0.2), on_cpu(10.0, spread=0.2), "20.00", "~2.0"),
        (on_cpu(20.0, spread=0.5), on_cpu(10.0), "20.00~", "noisy"),
        (on_cpu(11.0, spread=0.2), on_cpu(10.0), "11.00", "noisy"),
        (on_cpu(10.1), on_cpu(10.0), "10.10", "1.01"),
    ],
)
def test_a_ratio_of_noisy_times_is_not_shown(candidate: Speed, baseline: Speed, device_us: str, ratio: str) -> None:
    """On the CPU a noisy time is marked with `~`, and a ratio that the noise makes meaningless is `noisy`."""
    records = [
        record(kind="speed", check=OK, speed=candidate),
        record("sdpa", kind="speed", role="baseline", check=OK, speed=baseline),
    ]
    rows = {row.variant: row for row in make_rows(records)}
    assert (device_us, ratio) == (rows["mine"].device_us, rows["mine"].versus_baseline)
    assert rows["sdpa"].versus_baseline == "1.000"


# -- text -------------------------------------------------------------------------------------------------------------


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
def test_a_headline_has_what_was_measured(changes: dict[str, Any], text: str) -> None:
    """The headline has the outcome, and the error and the times if they were measured."""
    assert text == headline(record(**changes))


def test_the_pilot_of_a_gate_is_not_counted() -> None:
    """A gate whose pilot failed adds nothing to the number of failed checks; alone it has a row."""
    wrong, pilot = record(outcome=Outcome.WRONG, check=WRONG), record(kind="gate", outcome=Outcome.WRONG, check=WRONG)
    assert [make_rows(records)[0].checks for records in ([wrong, pilot], [pilot])] == ["WRONG 1/1", "WRONG 1/1"]


def test_a_failed_architecture_is_not_shown_as_another() -> None:
    """If one architecture does not compile, the others are shown as built, and the failure has its own row."""
    partly = record(kind="build", outcome=Outcome.NOT_BUILT, builds=(build("sm_90a", k=(100, 0, 0)),))
    assert [(row.case, row.checks) for row in make_rows([partly])] == [("-", "NOT BUILT"), ("sm_90a", "built")]


def test_a_row_of_an_earlier_run_says_when_it_was_measured() -> None:
    """Its age stands in place of the checks; a row of this run has its own."""
    own, earlier = record("mine", check=OK, speed=speed(9.0)), record("sdpa_cudnn", role="baseline", speed=speed(10.0))
    (group,) = make_groups([own, earlier], ages={("sdpa_cudnn", SHAPE): 125.0})
    assert [(row.variant, row.checks, row.versus_baseline) for row in group.rows] == [
        ("mine", "ok 1/1", "0.900"),
        ("sdpa_cudnn", "2 min ago", "1.000"),
    ]
    assert (age_text(41.2), age_text(60.0)) == ("41 s ago", "1 min ago")
