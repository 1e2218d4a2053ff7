"""`busy`: what the profiler says of every kernel, memset and copy of a call.

In a process of its own: a profiler that was once attached slows launches down for as long as its process lives.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pytest_fa.measure.device_time import capture, event_us
from pytest_fa.measure.launch_overhead import period_of_spin_us
from pytest_fa.measure.launches import Captured
from pytest_fa.records.agreement import LONG_NODE_US
from pytest_fa.records.timing import NodeTime, ProfilerTime
from pytest_fa.run.device_tools import DeviceTools

CALLS = 10
REPLAYS = 3
LOADED_US = 500_000.0  # under a power cap the clocks fall within this time
SPIN_US = (2.0, 30.0)


def read_profiler_time(
    call: Callable[[], object],
    begin: Callable[[], object],
    captured: Captured,
    tools: DeviceTools,
    watch: Callable[[], object],
) -> ProfilerTime:
    """Durations of a call's nodes, and what lies between the two clocks for nodes of the same geometry.

    Long nodes are read under the load under which they are timed: where power is short, a few calls run faster.
    """
    node_count = sum(each.count for each in captured.launches) + sum(captured.other_nodes.values())
    graph = capture(call, CALLS, begin)
    watch()
    graph.replay()
    period_us = event_us(graph.replay, REPLAYS) / (CALLS * REPLAYS)
    each_us = min(max(SPIN_US[0], period_us / node_count), SPIN_US[1])
    cycles = int(each_us * tools.cycles_per_us)
    memsets = sum(captured.other_nodes.values())  # a copy of a few bytes takes as long

    def spin_call() -> None:
        tools.spin_like(captured.launches, cycles, memsets)

    spin_period_us = period_of_spin_us(spin_call, CALLS, watch)
    spin = capture(spin_call, CALLS)
    spin.replay()
    watch()
    spins = _durations(spin)
    watch()
    loading = math.ceil(LOADED_US / (CALLS * period_us)) if period_us >= LONG_NODE_US * node_count else 0
    nodes = _durations(graph, loading * CALLS * node_count, loading)
    wanted = CALLS * REPLAYS * node_count
    times = [
        NodeTime(name, sum(found) / len(found), round(len(found) / (CALLS * REPLAYS))) for name, found in nodes.items()
    ]
    profiler_us = sum(sum(found) for found in nodes.values()) / (CALLS * REPLAYS)
    spin_us = sum(sum(found) for found in spins.values()) / (CALLS * REPLAYS)
    missing = abs(wanted - sum(len(found) for found in nodes.values()))
    return ProfilerTime(profiler_us, spin_period_us - spin_us, tuple(times), missing)


def _durations(graph: torch.cuda.CUDAGraph, left_out: int = 0, loading: int = 0) -> dict[str, list[float]]:
    """Microseconds of everything that ran on the device while a graph was replayed, by name.

    So many replays come before, and their records are left out.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(loading + REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(list)
    results: Any = profiler.profiler.kineto_results
    events = (each for each in results.events() if each.device_type() == torch.autograd.DeviceType.CUDA)  # type: ignore[attr-defined]
    for event in sorted(events, key=lambda each: each.start_ns())[left_out:]:
        found[_short(event.name())].append(event.duration_ns() / 1000)
    return dict(found)


def _short(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    plain = re.sub(r"\(anonymous namespace\)", "anonymous", name).removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0]
