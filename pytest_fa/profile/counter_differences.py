"""A kernel's counters beside the SDPA kernel's at the same shape, sorted by what matters."""

from __future__ import annotations

import math

from pytest_fa.profile import presets
from pytest_fa.profile.bottleneck import tensor_percent
from pytest_fa.records.tool_results import DURATION, CountedKernel, CounterDifference

# What stands for itself beside time comes first: how full the chip and its units are, then what explains it.
# Label, weight, and the least value: what is below counts as that much; nearly nothing beside nothing is alike.
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
_STALL_WEIGHT, _LEAST_WARPS = 1.5, 0.2


def differences(ours: CountedKernel, theirs: CountedKernel) -> tuple[CounterDifference, ...]:
    """Every counter that both have, those first that differ most, by factors, each times what it matters."""
    labels = dict(_WEIGHTS)
    for reason in presets.STALLS:
        if reason != "selected":
            labels[presets.stall(reason)] = (f"warps waiting: {reason}", _STALL_WEIGHT, _LEAST_WARPS)
    found = [
        _difference(ours.counters[name], theirs.counters[name], *how)
        for name, how in labels.items()
        if name in ours.counters and name in theirs.counters
    ]
    pipes = tensor_percent(ours.counters), tensor_percent(theirs.counters)
    if pipes[0] and pipes[1]:
        found.append(_difference(pipes[0][1], pipes[1][1], *_TENSOR))
    return tuple(sorted((each for each in found if each.weight > 0), key=lambda each: -each.weight))


def _difference(ours: float, theirs: float, label: str, weight: float, least: float) -> CounterDifference:
    factor = abs(math.log2(max(ours, least) / max(theirs, least)))
    return CounterDifference(label, ours, theirs, round(weight * factor, 3))
