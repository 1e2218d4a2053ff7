"""`profiler_us`: the sum of the durations that torch's profiler reports for the kernels, memsets and copies of a call.

The candidate's process reports the durations, and nothing is timed in it.  They count only if its calls do their work:
these calls read secret data, as timed calls do, and the judge judges what they wrote.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from pytest_fa.errors import FaError
from pytest_fa.gpu.device_tools import DeviceTools
from pytest_fa.gpu.graphs import capture
from pytest_fa.gpu.profiler import durations_us
from pytest_fa.judge.clocks.fresh_data import FreshData, Written
from pytest_fa.judge.clocks.launch_overhead import calls_of_graph, period_of_spin_us
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.records.agreement import LONG_NODE_US
from pytest_fa.records.environment import ClockMonitor
from pytest_fa.records.timing import CallNodes, Clocks, ProfilerTime
from pytest_fa.wire.commands import Load, Profile

CALLS = (3, 30)  # that are read: the fewest, and the most
READ_US = 30_000.0  # the intended length of the calls that are read
HEADS = 5  # that are judged, besides one of the last output or chosen like it
LOADED_US = 500_000.0  # of load before long nodes are read: under a power cap, the clocks fall within this time
CLOCKS_AT = 0.75  # of the load has run when the clocks are read
SPIN_US = (2.0, 30.0)  # the shortest and the longest spin kernel
SPIN_REPLAYS = 3  # under the profiler; the shortest counts, because the GPU's clock rises during the first


class NotProfiled(FaError):
    """The profiler has no time for these calls; the message gives the reason."""


class Profiled(NamedTuple):
    """The profiler's time, and what some of the profiled calls wrote."""

    time: ProfilerTime
    written: list[Written]


def profile_calls(data: FreshData, device_us: float, tools: DeviceTools, clocks: ClockMonitor) -> Profiled:
    """Have calls that take about `device_us` each run under the profiler, in the candidate's process.

    Long nodes are read after 0.5 s of load, as they are timed: under a power cap, the first calls run faster.  During
    this load, the judge reads the clocks.  Other data follow, so that the calls that are read have their work to do.
    Raises `NotProfiled` and `CannotCapture`.
    """
    fewest, most = CALLS
    series = TimedSeries(data, "profiled", max(fewest, min(most, math.ceil(READ_US / device_us))))
    nodes = series.nodes
    if series.captured.launches_missing:
        raise NotProfiled(series.captured.launches_missing)
    if not nodes.launches:
        raise NotProfiled("it launches no kernel")
    node_count = sum(launch.count for launch in nodes.launches) + sum(nodes.other_nodes.values())
    offset_us = _clock_offset_us(data, nodes, device_us / node_count, tools)
    series.time()  # a warm-up
    read = None
    if device_us >= LONG_NODE_US * node_count:
        read = _clocks_under_load(series, math.ceil(LOADED_US / (series.calls * device_us)), clocks)
    timed = series.time(heads=HEADS, command=Profile(series.name))
    if (report := timed.profiled) is None:
        raise NotProfiled("the profiled process named no durations")
    written = [series.written_head(), *series.written_heads()]
    data.require_untouched()
    profiler_us = sum(node.mean_us * node.count for node in report.nodes)
    missing = abs(series.calls * node_count - report.records)
    return Profiled(ProfilerTime(profiler_us, offset_us, report.nodes, missing, read), written)


def _clocks_under_load(series: TimedSeries, replays: int, clocks: ClockMonitor) -> Clocks | None:
    """What the judge reads while the graph is replayed again and again."""
    readings: list[Clocks | None] = []

    def read() -> None:
        time.sleep(CLOCKS_AT * LOADED_US / 1e6)
        readings.append(clocks.now())

    series.data.candidate.timed(Load(series.name, replays), meanwhile=read)
    return readings[0]


def _clock_offset_us(data: FreshData, nodes: CallNodes, node_us: float, tools: DeviceTools) -> float:
    """The gap between the period's clock and the profiler's: period minus durations, in microseconds per call.

    The two do not begin and end at the same instants.  The judge measures the gap in its own process, on as many spin
    kernels of the same geometry, which last as long as the nodes on average, but at least 2 us and at most 30 us.
    """
    spin_us = min(max(SPIN_US[0], node_us), SPIN_US[1])
    cycles = int(spin_us * tools.cycles_per_us)
    memsets = sum(nodes.other_nodes.values())  # copies too: a copy of a few bytes takes as long as a memset
    calls = calls_of_graph(spin_us * sum(launch.count for launch in nodes.launches))
    before_launch = data.candidate.before_launch

    def spin_call() -> None:
        tools.spin_like(nodes.launches, cycles, memsets)

    period_us = period_of_spin_us(spin_call, calls, before_launch)
    spin = capture(spin_call, calls)
    spin.replay()
    before_launch()
    return period_us - _least_replay_us(durations_us(spin, SPIN_REPLAYS), SPIN_REPLAYS) / calls


def _least_replay_us(durations: dict[str, list[float]], replays: int) -> float:
    """The shortest sum of durations of one replay, of several replays of one graph.

    Raises `NotProfiled` if the profiler lost a record.
    """
    if not durations or any(len(each) % replays for each in durations.values()):
        raise NotProfiled("the profiler lost records of the spin kernels by which its clock is compared")
    sums_us = [0.0] * replays
    for each in durations.values():
        size = len(each) // replays
        for turn in range(replays):
            sums_us[turn] += sum(each[size * turn : size * (turn + 1)])
    return min(sums_us)
