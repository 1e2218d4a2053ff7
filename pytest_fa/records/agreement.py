"""Decide whether a measured time is valid: by the profiler's clock, the launched kernels, and the GPU's peak rate."""

from __future__ import annotations

from pytest_fa.records.ceilings import CEILING_MARGIN
from pytest_fa.records.timing import Agreement, ProfilerTime, Speed

LONG_NODE_US = 30.0  # mean duration from which a kernel counts as long
SHARE = 0.05  # allowed difference between the clocks, as a share of the period
SHORT_US = 0.4  # allowed difference per short kernel, in microseconds

# Substrings of kernel names: of the kernel of each SDPA backend, and of all attention kernels that torch ships.
BACKEND_KERNELS = {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", "sdpa_efficient": "fmha"}
TORCH_ATTENTION = ("pytorch_flash", "cudnn_generated", "fmha_cutlass")


def check_agreement(variant: str, role: str, speed: Speed, least_us: float = 0.0) -> Agreement:
    """Return whether a period agrees with the profiler, the launched kernels and the GPU's peak rate.

    `least_us` is the time that the matrix products alone take at the measured peak rate; 0 if that rate is not known.
    """
    if speed.device.median_us * CEILING_MARGIN < least_us:
        times = f"the period is {speed.device.median_us:.2f} us, the matrix products alone take {least_us:.2f} us"
        return Agreement(valid=False, reason=f"impossible on this GPU: {times}")
    if speed.device.is_throttled:
        return Agreement(valid=False, reason=f"throttled: {speed.device.dropped} samples were dropped")
    if speed.order == "branches":
        return Agreement(valid=False, reason="the kernels of the captured call are not one chain")
    names = [launch.mangled for launch in speed.launches]
    if wrong := _wrong_kernels(variant, role, names):
        return Agreement(valid=False, reason=wrong)
    if speed.profiler is None:
        return Agreement(valid=None, reason=speed.profiler_missing or "not profiled")
    return _compare(speed.device.median_us, speed.profiler)


def _compare(period_us: float, profiler: ProfilerTime) -> Agreement:
    """Compare the period with the profiler's durations.

    For long nodes (30 us or more on average), the sum of durations must be within 5 % of the period.  For short nodes,
    `clock_offset_us`, which was measured on as many kernels of the same launch geometry, is added first; the difference
    may then be 0.4 us per node, or 5 % if that is more.
    """
    count = sum(node.count for node in profiler.nodes)
    if profiler.missing_count or not count:
        return Agreement(valid=False, reason=f"the profiler lost {profiler.missing_count} records")
    if profiler.profiler_us / count >= LONG_NODE_US:
        profiled_us, allowed = profiler.profiler_us, SHARE * period_us
        profiled = f"profiler {profiler.profiler_us:.1f} us"
    else:
        profiled_us, allowed = profiler.profiler_us + profiler.clock_offset_us, max(SHORT_US * count, SHARE * period_us)
        profiled = f"profiler {profiler.profiler_us:.2f} us, clock offset {profiler.clock_offset_us:+.2f} us"
    difference = period_us - profiled_us
    return Agreement(
        valid=abs(difference) <= allowed,
        reason=f"period {period_us:.2f} us, {profiled}: difference {difference:+.2f} us, allowed {allowed:.2f} us",
        least_us=min(period_us, profiled_us),
    )


def _wrong_kernels(variant: str, role: str, names: list[str]) -> str:
    """Return what is wrong with the launched kernels: another backend's kernel, or torch's kernel in a candidate."""
    expected = BACKEND_KERNELS.get(variant)
    if names and expected and not any(expected in name for name in names):
        return f"{variant} launched {', '.join(names)}; no name contains {expected!r}"
    delegated = [name for name in names if any(part in name for part in TORCH_ATTENTION)]
    if role != "baseline" and delegated:
        return f"it launches torch's attention kernel {delegated[0]}"
    return ""
