"""Which times are valid: by two clocks, kernel names and the GPU's peak rate."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.records.agreement import check_agreement
from pytest_fa.records.timing import LaunchedKernel, NodeTime, ProfilerTime, Speed, Timing
from pytest_fa.report.timing_notes import timing_notes
from tests.factories import record, speed


def timed(period_us: float, profiler_us: float, offset_us: float = 0.0, count: int = 1, missing: int = 0) -> Speed:
    """Return a speed with this period and this profiler time of `count` nodes."""
    nodes = (NodeTime("kernel", profiler_us / count, count),)
    return msgspec.structs.replace(speed(period_us), profiler=ProfilerTime(profiler_us, offset_us, nodes, missing))


@pytest.mark.parametrize(
    ("measured", "valid"),
    [
        (timed(100.0, 103.0), True),
        (timed(100.0, 106.0), False),
        (timed(100.0, 94.0), False),
        (timed(9.07, 10.3, -1.2), True),  # the profiler's clock starts earlier
        (timed(9.07, 10.3, 0.0), False),
        (timed(9.07, 8.0, 0.6), False),
        (timed(10.2, 13.4, -3.0, count=2), True),
        (timed(65.0, 60.0, 4.0, count=12), True),  # many short nodes
        (timed(100.0, 100.0, missing=1), False),
        (timed(float("nan"), 100.0), False),
    ],
)
def test_the_clocks_must_agree(measured: Speed, *, valid: bool) -> None:
    """Long nodes must agree within 5 %; short ones, after adding the clock offset, within 0.4 us per node or 5 %."""
    assert check_agreement("ws_p2", "candidate", measured).valid is valid


def test_the_reason_has_both_figures() -> None:
    """The reason for an invalid time has the period, the profiler time, the clock offset and the allowed difference."""
    agreement = check_agreement("ws_p2", "candidate", timed(9.07, 8.0, 0.2))
    assert agreement.least_us == pytest.approx(8.2)
    assert agreement.reason == (
        "period 9.07 us, profiler 8.00 us, clock offset +0.20 us: difference +0.87 us, allowed 0.45 us"
    )


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


def test_a_time_below_the_least_possible_is_invalid() -> None:
    """A time that exceeds the GPU's peak matrix rate is invalid."""
    agreement = check_agreement("ws_p2", "candidate", timed(8.0, 8.0), least_us=10.0)
    assert (agreement.valid, agreement.reason) == (
        False,
        "impossible on this GPU: the period is 8.00 us, the matrix products alone take 10.00 us",
    )


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
