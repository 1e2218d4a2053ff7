"""`profiler_us`: the sum of the durations that torch's profiler reports for the kernels, memsets and copies of a call.

It is taken in a separate process, because a profiler that was attached once slows down launches for the rest of its
process.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

from pytest_fa.catalog.variant import Device
from pytest_fa.measure.launch_overhead import period_of_spin_us
from pytest_fa.records.agreement import LONG_NODE_US
from pytest_fa.records.timing import Clocks, NodeTime, ProfilerTime
from pytest_fa.run.device import synchronize
from pytest_fa.run.device_tools import DeviceTools
from pytest_fa.run.graph_nodes import Captured
from pytest_fa.run.graphs import capture, event_us

CALLS = 10  # in a graph
REPLAYS = 3  # that are read
LOADED_US = 500_000.0  # of load before long nodes are read: under a power cap, the clocks fall within this time
SPIN_US = (2.0, 30.0)  # the shortest and the longest spin kernel


def load_profiler(device: Device = "cuda") -> None:
    """Profile one small call: the first use of the profiler in a process takes seconds.

    Runs profile on a GPU only.  On the CPU, tests see what the profiler loads.
    """
    with _profiler(device):
        torch.ones(1, device=device)
        synchronize(torch.device(device))


def _profiler(device: Device = "cuda") -> profile:
    """A profiler of what runs on the device.

    `torch.profiler.profile` is built on it, but imports the compiler of torch.compile first, to ask for one of its
    settings.  That setting, TORCHINDUCTOR_CUDAGRAPHS, matters by default only before CUDA 12.6.
    """
    on_gpu = device == "cuda"
    return profile(use_cpu=not on_gpu, use_device="cuda" if on_gpu else None, use_kineto=True)


def read_profiler_time(
    call: Callable[[], object],
    captured: Captured,
    tools: DeviceTools,
    before_launch: Callable[[], object] = lambda: None,
    read_clocks: Callable[[], Clocks | None] = lambda: None,
) -> ProfilerTime:
    """Read the durations of a call's nodes, and the gap between the profiler's clock and the period's clock.

    A period differs from the sum of its nodes' durations, because the two clocks do not begin and end at the same
    instants.  The gap is measured on as many spin kernels of the same geometry, which last as long as the nodes on
    average, but at least 2 us and at most 30 us.

    Long nodes are read after 0.5 s of load, as they are timed: under a power cap, the first calls run faster.  During
    this load, `read_clocks` is called.
    """
    node_count = sum(launch.count for launch in captured.launches) + sum(captured.other_nodes.values())
    graph = capture(call, CALLS)
    before_launch()
    graph.replay()
    period_us = event_us(graph.replay, REPLAYS) / (CALLS * REPLAYS)
    spin_us_per_node = min(max(SPIN_US[0], period_us / node_count), SPIN_US[1])
    cycles = int(spin_us_per_node * tools.cycles_per_us)
    memsets = sum(captured.other_nodes.values())  # copies too: a copy of a few bytes takes as long as a memset

    def spin_call() -> None:
        tools.spin_like(captured.launches, cycles, memsets)

    spin_period_us = period_of_spin_us(spin_call, CALLS, before_launch)
    spin = capture(spin_call, CALLS)
    spin.replay()
    before_launch()
    spin_durations, _ = _durations(spin)
    before_launch()
    load_replays = math.ceil(LOADED_US / (CALLS * period_us)) if period_us >= LONG_NODE_US * node_count else 0
    durations, clocks = _durations(graph, load_replays * CALLS * node_count, load_replays, read_clocks)
    expected_count = CALLS * REPLAYS * node_count
    times = [
        NodeTime(name, sum(node_us) / len(node_us), round(len(node_us) / (CALLS * REPLAYS)))
        for name, node_us in durations.items()
    ]
    profiler_us = sum(sum(node_us) for node_us in durations.values()) / (CALLS * REPLAYS)
    spin_us = sum(sum(node_us) for node_us in spin_durations.values()) / (CALLS * REPLAYS)
    missing = abs(expected_count - sum(len(node_us) for node_us in durations.values()))
    return ProfilerTime(profiler_us, spin_period_us - spin_us, tuple(times), missing, clocks)


def _durations(
    graph: torch.cuda.CUDAGraph,
    skipped: int = 0,
    load_replays: int = 0,
    read_clocks: Callable[[], Clocks | None] = lambda: None,
) -> tuple[dict[str, list[float]], Clocks | None]:
    """Microseconds of everything that ran on the device during `REPLAYS` replays of a graph, by short name.

    `load_replays` replays come first; their `skipped` records are dropped.  The clocks are read when three quarters of
    them have run; without them, there are none.
    """
    clocks, three_quarters = None, torch.cuda.Event()  # type: ignore[no-untyped-call]
    with _profiler() as profiler:
        for number in range(load_replays + REPLAYS):
            graph.replay()
            if load_replays and number == load_replays * 3 // 4:
                three_quarters.record()
        if load_replays:
            three_quarters.synchronize()
            clocks = read_clocks()
        torch.cuda.synchronize()
    durations: dict[str, list[float]] = collections.defaultdict(list)
    results: Any = profiler.kineto_results
    events = (event for event in results.events() if event.device_type() == torch.autograd.DeviceType.CUDA)  # type: ignore[attr-defined]
    for event in sorted(events, key=lambda event: event.start_ns())[skipped:]:
        durations[_short(event.name())].append(event.duration_ns() / 1000)
    return dict(durations), clocks


def _short(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    plain = re.sub(r"\(anonymous namespace\)", "anonymous", name).removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0]
