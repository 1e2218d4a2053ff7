"""Which times are valid: by three clocks, kernel names and the GPU's peak rates."""

from __future__ import annotations

import math

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.records.agreement import (
    check_agreement,
    confirmed_by,
    is_call_too_short,
    is_unconfirmed,
    tampering_of,
    why_unconfirmed,
)
from pytest_fa.records.ceilings import Floor
from pytest_fa.records.timing import (
    ON_CPU,
    Agreement,
    Clocks,
    LaunchedKernel,
    NodeTime,
    OutsideTime,
    ProfilerTime,
    Speed,
    Timing,
)
from pytest_fa.table.timing_notes import timing_notes
from tests.factories import record, speed


def timed(period_us: float, profiler_us: float, offset_us: float = 0.0, count: int = 1, missing: int = 0) -> Speed:
    """Return a speed with this period and this profiler time of `count` nodes."""
    nodes = (NodeTime("kernel", profiler_us / count, count),)
    profiler = ProfilerTime(profiler_us, offset_us, nodes, missing)
    return msgspec.structs.replace(speed(period_us, call_us=2 * period_us), profiler=profiler)


@pytest.mark.parametrize(
    ("measured", "valid"),
    [
        (timed(100.0, 103.0), True),
        (timed(100.0, 106.0), False),
        (timed(100.0, 94.0), False),
        (timed(9.07, 10.3, -1.2), True),  # the profiler's clock starts earlier
        (timed(9.07, 10.3, 0.0), False),
        (timed(9.07, 8.0, 0.6), True),
        (timed(9.07, 7.9, 0.6), False),
        (timed(10.2, 13.4, -3.0, count=2), True),
        (timed(65.0, 60.0, 4.0, count=12), True),  # many short nodes
        (timed(100.0, 100.0, missing=1), False),
        (timed(float("nan"), 100.0), False),
    ],
)
def test_the_clocks_must_agree(measured: Speed, *, valid: bool) -> None:
    """Long nodes must agree within 5 %; short ones, after adding the clock offset, within 0.5 us per node or 5 %."""
    assert check_agreement("ws_p2", "candidate", measured).valid is valid


def clocks(sm_mhz: int, throttle_reasons: int) -> Clocks:
    """Return NVML's readings with this SM clock."""
    return Clocks(sm_mhz, 3201, 690.0, 60, throttle_reasons)


@pytest.mark.parametrize(
    ("profiler_us", "reasons", "valid"),
    [
        (106.0, 0x04, True),
        (114.0, 0x04, True),
        (116.0, 0x04, False),
        (106.0, 0x01, False),
        (94.0, 0x04, False),
        (96.0, 0x04, True),
    ],
)
def test_under_a_power_cap_the_profiler_may_show_15_percent_more(
    profiler_us: float, reasons: int, *, valid: bool
) -> None:
    """Its load has no pauses, so it runs at lower clocks.  Other reasons allow nothing, nor does a shorter time."""
    measured = msgspec.structs.replace(timed(100.0, profiler_us), clocks_during=clocks(1800, reasons))
    assert check_agreement("ws_p2", "candidate", measured).valid is valid
    after = msgspec.structs.replace(timed(100.0, profiler_us), clocks_after=clocks(1800, reasons))
    assert check_agreement("ws_p2", "candidate", after).valid is valid
    plain = timed(100.0, profiler_us)
    assert plain.profiler is not None
    profiler = msgspec.structs.replace(plain.profiler, clocks=clocks(1700, reasons))
    only_there = msgspec.structs.replace(plain, clocks_during=clocks(1980, 0), profiler=profiler)
    assert check_agreement("ws_p2", "candidate", only_there).valid is valid


def test_a_time_that_the_judge_contradicts_has_the_shortest_of_all() -> None:
    """With it, a gate excludes a baseline that is too slow by every clock."""

    def least_us(
        slope_us: float = 110.0, profiler_us: float = 100.0, offset_us: float = 0.0, *, shares_outputs: bool = False
    ) -> float | None:
        outside = OutsideTime(slope_us, 0.001, 125.0, 200, None, None, shares_outputs)
        measured = msgspec.structs.replace(timed(100.0, profiler_us, offset_us), outside=outside)
        agreement = check_agreement("mine", "baseline", measured)
        assert agreement.valid is False
        assert msgspec.convert(msgspec.to_builtins(agreement), Agreement) == agreement  # a record of it can be read
        return agreement.least_us

    assert least_us() == 100.0
    assert least_us(profiler_us=60.0) == 60.0
    assert least_us(profiler_us=60.0, offset_us=-4.0) == 56.0
    assert least_us(slope_us=90.0) == 90.0
    assert least_us(slope_us=-1.0) is None
    assert least_us(shares_outputs=True) is None


def test_the_reason_has_both_figures(snapshot: SnapshotAssertion) -> None:
    """The reason for an invalid time has the period, the profiler time, the clock offset and the allowed difference."""
    agreement = check_agreement("ws_p2", "candidate", timed(9.07, 8.0, 0.2))
    assert agreement.least_us == pytest.approx(8.2)
    assert snapshot == agreement.reason


def launching(*names: str) -> Speed:
    """Return a speed whose call launches these kernels."""
    launches = tuple(LaunchedKernel(name, (1, 1, 1), (128, 1, 1), 0) for name in names)
    return msgspec.structs.replace(timed(100.0, 100.0), launches=launches)


@pytest.mark.parametrize(
    ("variant", "role", "kernel", "valid"),
    [
        ("sdpa_flash", "baseline", "_ZN13pytorch_flash16flash_fwd_kernelE", True),
        ("sdpa_flash", "baseline", "cudnn_generated_fort_native_sdpa", False),
        ("sdpa_cudnn", "baseline", "cudnn_generated_fort_native_sdpa", True),
        ("sdpa_efficient", "baseline", "fmha_cutlassF_f16_aligned_64x64_rf_sm80", True),
        ("ws_p2", "candidate", "attention_kernel", True),
        ("ws_p2", "candidate", "_ZN13pytorch_flash16flash_fwd_kernelE", False),
    ],
)
def test_kernel_names_must_fit_the_variant(variant: str, role: str, kernel: str, *, valid: bool) -> None:
    """An SDPA backend must launch its own kernel, and a candidate none of torch's attention kernels."""
    assert check_agreement(variant, role, launching(kernel)).valid is valid


def test_kernels_that_the_profiler_saw_count_too(snapshot: SnapshotAssertion) -> None:
    """A candidate that launches torch's attention kernel only in the profiler's process is named, too."""
    measured = timed(8.0, 8.0)
    assert measured.profiler is not None
    nodes = (*measured.profiler.nodes, NodeTime("pytorch_flash::flash_fwd_kernel", 1.0, 1))
    profiler = msgspec.structs.replace(measured.profiler, nodes=nodes)
    agreement = check_agreement("ws_p2", "candidate", msgspec.structs.replace(measured, profiler=profiler))
    assert agreement.valid is False
    assert snapshot == agreement.reason


def test_a_time_that_was_compared_with_no_clock_does_not_count() -> None:
    """Without an agreement a time is not confirmed; with one, only a contradiction counts."""
    agreements = (
        None,
        Agreement(valid=False, reason="too short"),
        Agreement(valid=None, reason=""),
        Agreement(True, ""),
    )
    speeds = [msgspec.structs.replace(timed(8.0, 8.0), agreement=agreement) for agreement in agreements]
    assert [is_unconfirmed(speed) for speed in speeds] == [True, True, False, False]
    assert [why_unconfirmed(speed) for speed in speeds[:2]] == ["it was compared with no other clock", "too short"]


def test_a_time_below_the_least_possible_is_invalid(snapshot: SnapshotAssertion) -> None:
    """A time that exceeds the GPU's peak matrix rate is invalid."""
    agreement = check_agreement("ws_p2", "candidate", timed(8.0, 8.0), Floor(matrices_us=10.0))
    assert agreement.valid is False
    assert snapshot == agreement.reason


def test_a_time_in_which_the_bytes_cannot_be_moved_is_invalid(snapshot: SnapshotAssertion) -> None:
    """A time more than 15 % below that of a copy of as many bytes is invalid."""
    agreements = [
        check_agreement("ws_p2", "candidate", timed(period_us, period_us), Floor(1.0, bytes_us=10.0))
        for period_us in (8.8, 8.6)
    ]
    assert [agreement.valid for agreement in agreements] == [True, False]
    assert snapshot == agreements[1].reason


# -- the judge's clock ------------------------------------------------------------------------------------------------

LONG = timed(100.0, 100.0)
SHORT = timed(2.0, 2.0)


def by_judge(measured: Speed, slope_us: float, whole_us: float, proof_us: float | None) -> Speed:
    """Return a speed with these times by the judge's clock: 3000 calls in the longer run, 1000 in the proof sample."""
    outside = OutsideTime(slope_us, 0.001, whole_us, 3000, proof_us, None if proof_us is None else 1000)
    return msgspec.structs.replace(measured, outside=outside)


@pytest.mark.parametrize(
    ("measured", "valid"),
    [
        (by_judge(LONG, 102.1, 102.0, 102.0), True),
        (by_judge(LONG, 102.2, 102.0, 102.0), False),
        (by_judge(LONG, 97.8, 100.0, 100.0), False),
        (by_judge(SHORT, 2.09, 2.1, 2.1), True),  # 0.1 us is more than 2 % of it
        (by_judge(SHORT, 2.11, 2.1, 2.1), False),
        (by_judge(LONG, 100.0, 105.4, 105.2), True),
        (by_judge(LONG, 100.0, 105.6, 105.2), False),  # 5 %, 0.1 us, and 1,200 us over 3000 calls
        (by_judge(LONG, 100.0, 100.0, 105.1), True),
        (by_judge(LONG, 100.0, 100.0, 105.3), False),  # 5 %, 0.1 us, and 100 us over 1000 calls
        (by_judge(LONG, 100.0, 100.2, 105.9), True),
        (by_judge(LONG, 100.0, 100.2, 106.0), False),  # a run has 600 us besides its calls: 750 us more
        (by_judge(LONG, 100.0, 105.0, 106.2), True),
        (by_judge(LONG, 100.0, 105.0, 106.4), False),  # of which 1,200 us count
        (by_judge(LONG, 105.4, 105.4, None), True),  # without a graph there is no slope
        (by_judge(LONG, 105.6, 105.6, None), False),
        (by_judge(LONG, math.nan, 100.0, 100.0), False),
        (by_judge(LONG, 100.0, math.nan, 100.0), False),
        (by_judge(LONG, 100.0, 100.0, math.nan), False),
    ],
)
def test_the_clock_of_the_judge_must_confirm_a_time(measured: Speed, *, valid: bool) -> None:
    """The slope, the whole run and the proof sample by the judge's clock must each be close to the period."""
    assert check_agreement("ws_p2", "candidate", measured).valid is valid


@pytest.mark.parametrize(
    ("slope_us", "reasons", "valid"), [(104.9, 0x04, True), (105.1, 0x04, False), (104.9, 0x01, False)]
)
def test_under_a_power_cap_the_slope_may_differ_by_5_percent(slope_us: float, reasons: int, *, valid: bool) -> None:
    """The SM clock moves between the windows of the two clocks; only the judge's own reading of the cap counts."""
    measured = by_judge(LONG, slope_us, 102.0, 102.0)
    for place in ("clocks_during", "clocks_after"):
        read = msgspec.structs.replace(measured, **{place: clocks(1800, reasons)})
        assert check_agreement("ws_p2", "candidate", read).valid is valid
    assert LONG.profiler is not None
    profiler = msgspec.structs.replace(LONG.profiler, clocks=clocks(1700, 0x04))
    assert check_agreement("x", "candidate", msgspec.structs.replace(measured, profiler=profiler)).valid is False


@pytest.mark.parametrize(
    ("publish_us", "whole_us", "valid"), [(0.0, 105.6, False), (600.0, 105.6, True), (600.0, 105.8, False)]
)
def test_a_run_may_contain_the_copies_of_its_inputs(publish_us: float, whole_us: float, *, valid: bool) -> None:
    """The judge's clock starts before the inputs are copied: 600 us over 3000 calls are 0.2 us more."""
    measured = by_judge(LONG, 100.0, whole_us, 100.0)
    assert measured.outside is not None
    outside = msgspec.structs.replace(measured.outside, publish_us=publish_us)
    assert check_agreement("x", "candidate", msgspec.structs.replace(measured, outside=outside)).valid is valid


@pytest.mark.parametrize(("outputs", "whole_us", "valid"), [(1, 105.6, False), (3, 105.6, True), (3, 105.8, False)])
def test_a_run_of_calls_with_more_outputs_may_contain_more(outputs: int, whole_us: float, *, valid: bool) -> None:
    """The copies of two outputs more may take 500 us of a run of 3000 calls."""
    measured = by_judge(LONG, 100.0, whole_us, 100.0)
    assert measured.outside is not None
    outside = msgspec.structs.replace(measured.outside, outputs=outputs)
    assert check_agreement("x", "candidate", msgspec.structs.replace(measured, outside=outside)).valid is valid


@pytest.mark.parametrize(
    ("fill_us", "proof_us", "valid"),
    [(0.0, 110.0, False), (7.0, 112.1, True), (20.0, 125.1, True), (20.0, 125.3, False)],
)
def test_large_outputs_may_take_as_long_as_they_take_to_write(fill_us: float, proof_us: float, *, valid: bool) -> None:
    """A call of the proof sample may be longer by the time in which the judge writes its output to memory."""
    measured = by_judge(LONG, 100.0, 100.0, proof_us)
    assert measured.outside is not None
    outside = msgspec.structs.replace(measured.outside, fill_us=fill_us)
    assert check_agreement("scores", "probe", msgspec.structs.replace(measured, outside=outside)).valid is valid


def test_wrong_outputs_under_the_profiler_are_not_confirmed() -> None:
    """A reason for which nothing was profiled leaves the time to the judge's clock; wrong outputs do not."""
    wrong = "max error 1.0, allowed 0.1 in an output of the profiled calls"
    for missing, valid in (("the profiler is not permitted here", None), (wrong, False)):
        measured = msgspec.structs.replace(LONG, profiler=None, profiler_missing=missing)
        agreement = check_agreement("mine", "candidate", measured)
        assert (agreement.valid, agreement.reason) == (valid, missing)


def test_other_kernels_in_a_timed_graph_are_not_confirmed() -> None:
    """A time is that of the calls that the record names, or it does not count."""
    differs = "in the graph of 3000 calls that is timed, a call is nothing; alone it is 1 x attend"
    agreement = check_agreement("mine", "candidate", msgspec.structs.replace(LONG, graphs_differ=differs))
    assert (agreement.valid, agreement.reason) == (False, differs)


def test_one_buffer_for_all_calls_is_not_confirmed() -> None:
    """If all calls return one buffer, the time is not confirmed, and the reason says what to write."""
    measured = by_judge(LONG, 100.0, 100.0, 100.0)
    assert measured.outside is not None
    outside = msgspec.structs.replace(measured.outside, shares_outputs=True)
    agreement = check_agreement("mine", "candidate", msgspec.structs.replace(measured, outside=outside))
    assert agreement.valid is False
    assert agreement.reason.endswith("write the result into `out`, or return a new tensor")


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (
            by_judge(LONG, 200.0, 200.0, 200.0),
            (
                "the judge's clock shows 200.00 us and the candidate's own clock 100.00 us, which is 50 % shorter: "
                "allowed difference 2.10 us"
            ),
        ),
        (
            by_judge(LONG, 103.0, 103.0, 103.0),
            "the judge's clock shows 103.00 us and the candidate's own clock 100.00 us: allowed difference 2.10 us",
        ),
        (
            by_judge(LONG, 100.0, 125.0, 100.0),
            (
                "by the judge's clock, a run of 3000 calls takes 125.00 us per call, by the candidate's own clock "
                "100.00 us, which is 20 % shorter: allowed 105.50 us"
            ),
        ),
        (
            by_judge(LONG, 100.0, 100.0, 150.0),
            (
                "where each of 1000 calls writes an output of its own, a call takes 150.00 us, otherwise 100.00 us: "
                "allowed 105.20 us; it seems to skip work whose result is overwritten"
            ),
        ),
    ],
)
def test_the_reason_has_the_figures_of_both_clocks(measured: Speed, reason: str) -> None:
    """A time that the judge's clock contradicts is invalid, and the reason has both figures and the allowed one."""
    agreement = check_agreement("ws_p2", "candidate", measured)
    assert (agreement.valid, agreement.reason) == (False, reason)


@pytest.mark.parametrize(
    ("slope_us", "whole_us", "proof_us", "is_proof"),
    [
        (100.0, 100.0, 100.0, False),
        (105.0, 105.0, 105.0, False),
        (106.0, 106.0, 106.0, True),
        (90.0, 90.0, 90.0, False),  # the own clock shows more
        (100.0, 130.0, 100.0, False),  # a message that a busy machine delays
        (100.0, 140.0, 100.0, True),  # the shorter graph was slowed down
        (130.0, 130.0, None, False),  # without a graph, both figures contain a message
        (140.0, 140.0, None, True),
        (math.nan, math.nan, 100.0, False),
    ],
)
def test_a_clock_that_is_too_short_is_proof_of_tampering(
    slope_us: float,
    whole_us: float,
    proof_us: float | None,
    is_proof: bool,  # noqa: FBT001  # a parameter
) -> None:
    """The slope proves from 5 % on, beyond its own uncertainty; a whole run, which contains a message, from 25 % on."""
    outside = by_judge(LONG, slope_us, whole_us, proof_us).outside
    assert outside is not None
    assert bool(tampering_of(100.0, outside)) is is_proof


@pytest.mark.parametrize("precision", [0.05, None])
def test_an_unsure_slope_proves_nothing(precision: float | None) -> None:
    """A slope of 106 us that is known to 5 %, or not at all, is no proof against a clock of 100 us."""
    assert tampering_of(100.0, OutsideTime(106.0, precision, 106.0, 3000, 106.0)) == ""


def test_a_time_without_the_clock_of_the_judge_is_invalid(snapshot: SnapshotAssertion) -> None:
    """On a GPU a time needs the judge's clock; on the CPU it is the only one."""
    measured = msgspec.structs.replace(LONG, outside=None)
    refused = check_agreement("ws_p2", "candidate", measured)
    on_cpu = msgspec.structs.replace(measured, profiler=None, profiler_missing=ON_CPU, cold_missing=ON_CPU)
    assert refused.valid is False
    assert snapshot == refused.reason
    assert check_agreement("ws_p2", "candidate", on_cpu).valid is None


# -- other reasons ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"order": "branches"}, "the kernels of the captured call are not one chain"),
        (
            {"device": Timing("slope", (1.0,), 1.0, 1, dropped=9, is_throttled=True)},
            "throttled: 9 samples were dropped",
        ),
    ],
)
def test_branches_and_throttling_make_a_time_invalid(changes: dict[str, object], reason: str) -> None:
    """A time with parallel branches or throttled samples is invalid, even if the profiler confirms it."""
    agreement = check_agreement("ws_p2", "candidate", msgspec.structs.replace(timed(100.0, 100.0), **changes))
    assert (agreement.valid, agreement.reason) == (False, reason)


def test_without_a_profiler_time_validity_is_unknown() -> None:
    """Without a profiler time, `valid` is None."""
    unprofiled = msgspec.structs.replace(speed(10.0), profiler_missing="runs on the CPU")
    agreement = check_agreement("ws_p2", "candidate", unprofiled)
    assert (agreement.valid, agreement.reason) == (None, "runs on the CPU")


def test_the_notes_report_doubtful_times() -> None:
    """The notes name unconfirmed times, overlapping kernels, other GPU processes, and the backends' kernels."""
    doubtful = timed(9.0, 20.0)
    doubtful = msgspec.structs.replace(
        doubtful,
        agreement=check_agreement("ws_p2", "candidate", doubtful),
        other_gpu_processes=("77 train.py",),
        order="programmatic",
    )
    notes = timing_notes(
        [
            record("mine", kind="speed", speed=doubtful),
            record("sdpa_flash", kind="speed", role="baseline", speed=timed(10.0, 10.0)),
        ]
    )
    assert [note.split(":")[0] for note in notes] == [
        "time not confirmed",
        "period_pdl",
        "another process was using the GPU",
        "sdpa_flash ran kernel",
    ]


@pytest.mark.parametrize(("call_us", "is_too_short"), [(80.0, True), (89.8, True), (95.0, False), (100.0, False)])
def test_a_call_is_no_shorter_than_its_kernel(call_us: float, is_too_short: bool) -> None:  # noqa: FBT001  # a parameter
    """A call from Python that seems clearly shorter than its period is marked; the period itself stays valid."""
    measured = msgspec.structs.replace(LONG, call=Timing("wall clock", (call_us,), call_us, 1))
    assert is_call_too_short(measured) == is_too_short
    assert check_agreement("ws_p2", "candidate", measured).valid


def test_an_empty_kernel_has_no_work_to_skip() -> None:
    """The proof sample of an empty kernel may take longer: its calls are bound by their launches."""
    measured = by_judge(LONG, 100.0, 100.0, 150.0)
    assert check_agreement("noop", "overhead", measured).valid
    assert not check_agreement("ws_p2", "candidate", measured).valid


def test_which_clocks_confirm_a_time() -> None:
    """A time that the judge's clock did not measure is never confirmed by `yes`."""
    measured = msgspec.structs.replace(timed(8.0, 8.0), agreement=Agreement(True, ""))
    without_judge = msgspec.structs.replace(measured, outside=None)
    contradicted = msgspec.structs.replace(without_judge, agreement=Agreement(False, "too short"))
    assert [confirmed_by(each) for each in (measured, without_judge, contradicted)] == [
        "yes",
        "by the profiler only",
        "NO",
    ]
