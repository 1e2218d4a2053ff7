"""Two clocks, names, and what is possible: which times are believed."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.records.agreement import agree
from pytest_fa.records.timing import LaunchedKernel, NodeTime, ProfilerTime, Speed, Timing
from pytest_fa.report.timing_notes import timing_notes
from tests.factories import record, speed


def timed(period_us: float, profiler_us: float, clock_gap_us: float = 0.0, count: int = 1, missing: int = 0) -> Speed:
    """A period, and what the profiler said of so many nodes."""
    nodes = (NodeTime("kernel", profiler_us / count, count),)
    return msgspec.structs.replace(speed(period_us), profiler=ProfilerTime(profiler_us, clock_gap_us, nodes, missing))


@pytest.mark.parametrize(
    ("found", "valid"),
    [
        (timed(100.0, 103.0), True),
        (timed(100.0, 106.0), False),
        (timed(100.0, 94.0), False),
        (timed(9.07, 10.3, -1.2), True),  # the profiler's clock begins earlier
        (timed(9.07, 10.3, 0.0), False),
        (timed(9.07, 8.0, 0.6), False),
        (timed(10.2, 13.4, -3.0, count=2), True),
        (timed(65.0, 60.0, 4.0, count=12), True),  # many short ones: no long node among them
        (timed(100.0, 100.0, missing=1), False),
        (timed(float("nan"), 100.0), False),
    ],
)
def test_two_clocks(found: Speed, *, valid: bool) -> None:
    """5 % for long nodes; for short ones what lies between the clocks, give or take 0.4 us or 5 %."""
    assert agree("mine", "candidate", found).valid is valid


def test_the_reason_has_both_figures() -> None:
    """A time that is not confirmed comes with the period, the profiler's figure and what was allowed."""
    found = agree("mine", "candidate", timed(9.07, 8.0, 0.2))
    assert found.least_us == pytest.approx(8.2)
    assert found.reason == "period 9.07 us, profiler 8.00 us and +0.20 us between the clocks: +0.87 us of 0.45 allowed"


def launching(*names: str) -> Speed:
    """A time whose call launches these kernels."""
    launches = tuple(LaunchedKernel(name, (1, 1, 1), (128, 1, 1), 0) for name in names)
    return msgspec.structs.replace(timed(100.0, 100.0), launches=launches)


@pytest.mark.parametrize(
    ("variant", "role", "kernel", "valid"),
    [
        ("sdpa_flash", "baseline", "_ZN13pytorch_flash16flash_fwd_kernelE", True),
        ("sdpa_flash", "baseline", "cudnn_generated_fort_native_sdpa", False),
        ("sdpa_cudnn", "baseline", "cudnn_generated_fort_native_sdpa", True),
        ("sdpa_efficient", "baseline", "fmha_cutlassF_f16_aligned_64x64_rf_sm80", True),
        ("mine", "candidate", "attention_kernel", True),
        ("mine", "candidate", "_ZN13pytorch_flash16flash_fwd_kernelE", False),
    ],
)
def test_names_prove_who_ran(variant: str, role: str, kernel: str, *, valid: bool) -> None:
    """A pinned backend ran its own kernel, and a candidate none of torch's."""
    assert agree(variant, role, launching(kernel)).valid is valid


def test_the_impossible_is_named() -> None:
    """Faster than the device's own matrix rate is no time to believe."""
    found = agree("mine", "candidate", timed(8.0, 8.0), least_us=10.0)
    assert (found.valid, found.reason) == (
        False,
        "impossible on this GPU: 8.00 us, its matrix products alone take 10.00",
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"order": "branches"}, "the captured call is not one chain"),
        ({"device": Timing("slope", (1.0,), 1.0, 1, dropped=9, is_throttled=True)}, "throttled: 9 samples dropped"),
    ],
)
def test_other_doubts(changes: dict[str, object], reason: str) -> None:
    """Branches and throttled samples speak against a time whatever the profiler says."""
    found = agree("mine", "candidate", msgspec.structs.replace(timed(100.0, 100.0), **changes))
    assert (found.valid, found.reason) == (False, reason)


def test_without_a_profiler_nothing_is_claimed() -> None:
    """No figure to compare with is neither yes nor no."""
    found = agree("mine", "candidate", msgspec.structs.replace(speed(10.0), profiler_missing="runs on the CPU"))
    assert (found.valid, found.reason) == (None, "runs on the CPU")


def test_the_notes_say_it() -> None:
    """Below the table: what is not confirmed, who else was there, programmatic periods, what the backends ran."""
    doubtful = timed(9.0, 20.0)
    doubtful = msgspec.structs.replace(
        doubtful,
        agreement=agree("mine", "candidate", doubtful),
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
        "not confirmed",
        "period_pdl",
        "another process was on the GPU",
        "sdpa_flash ran kernel",
    ]
