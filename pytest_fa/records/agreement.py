"""Whether a time can be believed: the profiler's clock, the kernels that ran, and what the device can do at all."""

from __future__ import annotations

from pytest_fa.records.ceilings import IMPOSSIBLE
from pytest_fa.records.timing import Agreement, ProfilerTime, Speed

LONG_NODE_US = 30.0
SHARE = 0.05
SHORT_US = 0.4

# A part of the name of the kernel that each pinned backend launches, and of torch's own attention kernels.
BACKEND_KERNELS = {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", "sdpa_efficient": "fmha"}
TORCHS_OWN = ("pytorch_flash", "cudnn_generated", "fmha_cutlass")


def agree(variant: str, role: str, speed: Speed, least_us: float = 0.0) -> Agreement:
    """Hold a period to the profiler's durations, to the names of what was launched, and to what the device can do.

    `least_us` is what the matrix products alone take at the device's measured rate; 0 where that is not known.
    """
    if speed.device.median_us * IMPOSSIBLE < least_us:
        found = f"{speed.device.median_us:.2f} us, its matrix products alone take {least_us:.2f}"
        return Agreement(valid=False, reason=f"impossible on this GPU: {found}")
    if speed.device.is_throttled:
        return Agreement(valid=False, reason=f"throttled: {speed.device.dropped} samples dropped")
    if speed.order == "branches":
        return Agreement(valid=False, reason="the captured call is not one chain")
    names = [each.mangled for each in speed.launches]
    if wrong := _wrong_kernels(variant, role, names):
        return Agreement(valid=False, reason=wrong)
    if speed.profiler is None:
        return Agreement(valid=None, reason=speed.profiler_missing or "not profiled")
    return _compare(speed.device.median_us, speed.profiler)


def _compare(period_us: float, profiler: ProfilerTime) -> Agreement:
    """Long nodes: the durations are the period but for 5 %.  Short ones: but for what lies between the clocks.

    `clock_gap_us` was measured on as many nodes of the same geometry; 0.4 us are allowed for each.
    """
    count = sum(each.count for each in profiler.nodes)
    if profiler.missing_count or not count:
        return Agreement(valid=False, reason=f"the profiler lost {profiler.missing_count} records")
    if profiler.profiler_us / count >= LONG_NODE_US:
        profiled_us, allowed = profiler.profiler_us, SHARE * period_us
        said = f"profiler {profiler.profiler_us:.1f} us"
    else:
        profiled_us, allowed = profiler.profiler_us + profiler.clock_gap_us, max(SHORT_US * count, SHARE * period_us)
        said = f"profiler {profiler.profiler_us:.2f} us and {profiler.clock_gap_us:+.2f} us between the clocks"
    off = period_us - profiled_us
    return Agreement(
        valid=abs(off) <= allowed,
        reason=f"period {period_us:.2f} us, {said}: {off:+.2f} us of {allowed:.2f} allowed",
        least_us=min(period_us, profiled_us),
    )


def _wrong_kernels(variant: str, role: str, names: list[str]) -> str:
    """A backend that ran another backend's kernel, or a candidate that ran one of torch's."""
    expected = BACKEND_KERNELS.get(variant)
    if names and expected and not any(expected in name for name in names):
        return f"{variant} launched {', '.join(names)}: no kernel of {expected}"
    own = [name for name in names if any(part in name for part in TORCHS_OWN)]
    if role != "baseline" and own:
        return f"it launches torch's own attention kernel {own[0]}"
    return ""
