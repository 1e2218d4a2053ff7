"""Compares a kernel's counters with those of the SDPA kernel at the same shape, the most important difference first."""

from __future__ import annotations

import math

from pytest_fa.features.ncu import presets
from pytest_fa.features.ncu.bottleneck import tensor_percent
from pytest_fa.features.ncu.nsight_report import DURATION, CountedKernel, CounterDifference

# Counter -> label, weight, least value.  The time has the largest weight, then the utilisation of the chip and its
# units, then the counters that explain it.  A smaller value is raised to the least value, so that two values near
# zero do not differ by a large factor.
_WEIGHTS: dict[str, tuple[str, float, float]] = {
    DURATION: ("duration under the profiler, ns", 8.0, 1.0),
    presets.ISSUE: ("issue slots used, %", 3.0, 1.0),
    presets.SM: ("SM throughput, %", 3.0, 1.0),
    presets.MEMORY: ("memory throughput, %", 2.0, 1.0),
    presets.XU: ("exponential unit, %", 2.0, 1.0),
    presets.FMA: ("FMA pipe, %", 2.0, 1.0),
    presets.GRID: ("blocks", 2.0, 1.0),
    presets.OCCUPANCY: ("occupancy reached, %", 1.0, 1.0),
    presets.CONFLICTS: ("bank conflicts, shared memory", 1.0, 1000.0),
    presets.DRAM: ("DRAM throughput, %", 1.0, 1.0),
    presets.L2_HIT: ("L2 hits, %", 1.0, 1.0),
    presets.REGISTERS: ("registers per thread", 0.5, 1.0),
    presets.SMEM: ("shared memory per block, bytes", 0.5, 1024.0),
}
_TENSOR = ("tensor pipe, %", 4.0, 1.0)
_STALL_WEIGHT, _MIN_WARPS = 1.5, 0.2


def differences(kernel: CountedKernel, baseline: CountedKernel) -> tuple[CounterDifference, ...]:
    """The counters that both kernels have and in which they differ, sorted by weight times |log2 of the factor|."""
    weights = dict(_WEIGHTS)
    for reason in presets.STALLS:
        if reason != "selected":
            weights[presets.stall(reason)] = (f"warps waiting: {reason}", _STALL_WEIGHT, _MIN_WARPS)
    compared = [
        _difference(kernel.counters[name], baseline.counters[name], *label_weight_least)
        for name, label_weight_least in weights.items()
        if name in kernel.counters and name in baseline.counters
    ]
    pipes = tensor_percent(kernel.counters), tensor_percent(baseline.counters)
    if pipes[0] and pipes[1]:
        compared.append(_difference(pipes[0][1], pipes[1][1], *_TENSOR))
    return tuple(sorted((each for each in compared if each.weight > 0), key=lambda difference: -difference.weight))


def _difference(value: float, baseline_value: float, label: str, weight: float, least: float) -> CounterDifference:
    log_factor = abs(math.log2(max(value, least) / max(baseline_value, least)))
    return CounterDifference(label, value, baseline_value, round(weight * log_factor, 3))
