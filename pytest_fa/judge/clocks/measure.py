"""Measure one variant on one shape: device time, call time, cold time, launch overhead, launches and clocks."""

from __future__ import annotations

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.errors import Tampering
from pytest_fa.gpu.device_tools import NoDeviceTools, device_tools
from pytest_fa.gpu.graph_nodes import CALLS as NODE_CALLS
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.attached import require_no_tool
from pytest_fa.judge.clocks.call_time import call_time
from pytest_fa.judge.clocks.cpu_time import CPU_THREADS
from pytest_fa.judge.clocks.device_time import clocks_while_busy, device_time
from pytest_fa.judge.clocks.fresh_data import FreshData, Written
from pytest_fa.judge.clocks.launch_overhead import launch_overhead_us
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.records.agreement import tampering_of
from pytest_fa.records.environment import clock_monitor
from pytest_fa.records.sampling import timing
from pytest_fa.records.timing import ON_CPU, CallNodes, Clocks, LaunchedKernel, Speed, Timing
from pytest_fa.wire.commands import Cold, Done

CALL_TRIES = 3  # to measure a time per call that is not below the period
COLD_CALLS = 10  # in a graph
COLD_ROUNDS = 5
COLD_HEADS = 2  # of outputs of each round that are judged, besides one of the last output or chosen like it
LONG_COLD_US = 5000.0  # from this length of a call on, a graph has one call


def measure(candidate: Candidate, case: Case, inputs: Inputs) -> tuple[Speed, list[Written]]:
    """Measure the speed of an opened candidate on tensors like `inputs`, which hold other data in every call.

    Also returns what some of the timed calls wrote, for the caller to judge.  The caller must hold the GPU's
    `timing_lock`.  Raises `WrongResult` if a call changed its inputs, and `ToolAttached` if a profiler or another tool
    is attached to this process.  On the CPU, torch uses `CPU_THREADS` threads.
    """
    require_no_tool()
    device = candidate.device
    data = FreshData(candidate, case, inputs, l2_bytes(device))
    nodes = _launched(data)
    with clock_monitor("cuda" if device.type == "cuda" else "cpu") as clocks:
        before = clocks.now()
        on_device = device_time(data, clocks.is_slowed)
        during = clocks_while_busy(data, on_device.timing.median_us, clocks) if device.type == "cuda" else None
        after = clocks.now()
    per_call, written = _call_time(data, on_device.timing.median_us)
    cold, cold_missing = _cold(data, on_device.timing.median_us, written)
    candidate.forget_series()
    speed = Speed(
        device=on_device.timing,
        call=per_call,
        buffers=len(data.outs),
        exceeds_l2=data.exceeds_l2,
        launches=nodes.launches,
        launches_missing=nodes.launches_missing,
        clocks_before=before,
        clocks_after=after,
        clocks_during=during if isinstance(during, Clocks) else None,
        cold=cold,
        cold_missing=cold_missing,
        launch_overhead_us=_overhead_us(device, nodes.launches, candidate),
        order=nodes.order,
        other_nodes=nodes.other_nodes,
        cpu_threads=CPU_THREADS if device.type == "cpu" else None,
        outside=on_device.outside,
        l2_bytes=l2_bytes(device),
        graphs_differ=_difference(nodes, on_device.graphs),
        repeated_runs=data.gaps.runs,
    )
    return speed, on_device.written + written


def require_honest_clock(speed: Speed, *, shares_gpu: bool) -> None:
    """Raise `Tampering` if the clock of the candidate's process proves to be too short.

    With `shares_gpu`, kernels of other processes may have delayed what one of the clocks timed.  Then clocks that
    contradict each other prove nothing: the time is not confirmed.
    """
    if not shares_gpu and speed.outside and (proof := tampering_of(speed.device.median_us, speed.outside)):
        raise Tampering("clocks", proof)


def _launched(data: FreshData) -> Done:
    """What a captured call launches, or why that is not known."""
    if data.candidate.device.type == "cpu":
        return Done(launches_missing=ON_CPU)
    data.candidate.prepare("nodes", data.series(NODE_CALLS))
    try:
        return data.candidate.capture("nodes")
    except CannotCapture as problem:
        return Done(launches_missing=str(problem))


def _call_time(data: FreshData, device_us: float) -> tuple[Timing, list[Written]]:
    """The time per call from Python, and what some calls wrote.

    It cannot be below the period on the device.  If it is, for example because the GPU's clock has changed, it is
    measured again, and the longest time counts.
    """
    per_call, written = call_time(data)
    for _ in range(CALL_TRIES - 1):
        if data.candidate.device.type == "cpu" or per_call.median_us >= device_us:
            break
        again, more = call_time(data)
        per_call, written = max(per_call, again, key=lambda each: each.median_us), written + more
    return per_call, written


def _difference(alone: Done, graphs: tuple[TimedSeries, ...]) -> str:
    """How calls of timed graphs differ from the one that the record names; empty if none does."""
    if alone.launches_missing:
        return alone.launches_missing if graphs else ""
    nodes = CallNodes(alone.launches, alone.other_nodes, alone.order)
    return next((text for graph in graphs if (text := graph.difference(nodes, "alone"))), "")


def _cold(data: FreshData, device_us: float, written: list[Written]) -> tuple[Timing | None, str | None]:
    """The time of single calls with a cold L2, by the candidate's clock, or the reason why there is none.

    Adds to `written` what some of the calls wrote.
    """
    if data.candidate.device.type == "cpu":
        return None, ON_CPU
    series = TimedSeries(data, "cold", COLD_CALLS if device_us < LONG_COLD_US else 1, graph=False)
    samples_us: list[float] = []
    try:
        for index in range(COLD_ROUNDS + 1):  # each on its own data
            timed = series.time(heads=COLD_HEADS, command=Cold(series.name))
            written += [series.written_head(), *series.written_heads()]
            data.require_untouched()
            samples_us += timed.inside_us if index else ()  # the first round is a warm-up
    except (CannotCapture, NoDeviceTools) as problem:
        return None, str(problem).splitlines()[0]
    method = "event pair around one call after reading twice the L2, by the candidate's clock"
    return timing(method, samples_us, 1), None


def _overhead_us(device: torch.device, launches: tuple[LaunchedKernel, ...], candidate: Candidate) -> float | None:
    """The period of empty kernels with the geometry of a call's launches, in this process; None if it is not known."""
    if device.type == "cpu" or not launches:
        return None
    try:
        return launch_overhead_us(device_tools(device.index or 0), launches, candidate.before_launch)
    except (NoDeviceTools, CannotCapture):
        return None


def l2_bytes(device: torch.device) -> int | None:
    """The size of a GPU's L2 cache in bytes; None for a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else None
