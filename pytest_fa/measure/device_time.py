"""`device_us`: the period of back-to-back calls on the device.

Short calls: the slope between CUDA graphs of N and 3N calls, which cancels what a replay costs.  Calls of a
millisecond and more: one event pair each.  On the CPU: the wall clock of one call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from pytest_fa.errors import FaError, LaunchError
from pytest_fa.measure.rotation import Rotation
from pytest_fa.measure.sampling import FEWEST_SAMPLES, sample_until_precise, settle, timing
from pytest_fa.records.environment import ClockWatch
from pytest_fa.records.timing import Timing
from pytest_fa.run.forward import Forward

Watch = Callable[[], object]

SAMPLE_MS = 20.0
REPLAYS = 10
GRAPH_US = 200.0
PROBE_CALLS = 20
MOST_CALLS = 400
SLOW_CALL_US = 100_000.0  # such calls are not taken five at a time: the watchdog waits
LONG_CALL_US = 1000.0
MOST_SECONDS = 3.0
CPU_SAMPLES = (5, 50)
CPU_SECONDS = 0.2


class CannotCapture(FaError):
    """A call that does what a graph capture does not allow."""


def device_time(
    forward: Forward,
    rotation: Rotation,
    device: torch.device,
    watch: Watch = lambda: None,
    clocks: ClockWatch | None = None,
) -> Timing:
    """Time `forward` on the rotation's buffers, on its device; `rotation.outputs` are then those of timed calls."""
    is_slowed = clocks.is_slowed if clocks else lambda: False
    if device.type == "cpu":
        return _wall_clock(forward, rotation, watch)
    watch()
    estimate_us = event_us(lambda: rotation.call(forward))
    if estimate_us < SLOW_CALL_US:
        watch()
        estimate_us = event_us(lambda: rotation.call(forward), 5) / 5
    watch()
    try:
        estimate_us = _graph_estimate_us(forward, rotation, estimate_us)
    except CannotCapture as problem:
        return _event_pairs(forward, rotation, estimate_us, watch, is_slowed, f" ({problem})")
    if estimate_us >= LONG_CALL_US:
        return _event_pairs(forward, rotation, estimate_us, watch, is_slowed)
    return _graph_slope(forward, rotation, estimate_us, watch, is_slowed)


def _graph_slope(
    forward: Forward, rotation: Rotation, estimate_us: float, watch: Watch, is_slowed: Callable[[], bool]
) -> Timing:
    calls = max(1, min(MOST_CALLS, math.ceil(GRAPH_US / estimate_us)))
    once, thrice = (capture(lambda: rotation.call(forward), calls * times, rotation.begin) for times in (1, 3))
    once.replay()
    thrice.replay()
    pair_ms = (event_us(once.replay) + event_us(thrice.replay)) / 1000
    replays = max(REPLAYS, math.ceil(SAMPLE_MS / pair_ms))

    def sample_us(replays: int = replays) -> float:
        watch()
        short, long = event_us(once.replay, replays), event_us(thrice.replay, replays)
        return (long - short) / (2 * calls * replays)

    settle(lambda: sample_us(REPLAYS))
    rotation.flip()
    rotation.poison()
    method = f"slope between graphs of {calls} and {3 * calls} calls"  # each sample ends with the one captured last
    found = sample_until_precise(method, sample_us, 4 * calls * replays, is_slowed)
    if min(found.samples_us) <= 0:
        raise FaError("a graph of three times the calls does not take longer: the call launches nothing")
    return found


def _graph_estimate_us(forward: Forward, rotation: Rotation, eager_us: float) -> float:
    """Microseconds per call in a graph: eager calls of short kernels last as long as their launches."""
    calls = PROBE_CALLS if eager_us < GRAPH_US / 2 else 1
    probe = capture(lambda: rotation.call(forward), calls, rotation.begin)
    probe.replay()
    replays = REPLAYS if eager_us < LONG_CALL_US else 1
    return event_us(probe.replay, replays) / (calls * replays)


def capture(
    call: Callable[[], object], calls: int, begin: Callable[[], object] = lambda: None, *, keep_graph: bool = False
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `calls` calls in a row, on a stream of its own.  Raises `CannotCapture` with CUDA's words.

    `begin` is called between a first call, which stays out of the graph, and those in it.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # whatever a first call on a stream sets up stays out of the graph
        begin()
        try:
            graph.capture_begin()
            for _ in range(calls):
                call()
            graph.capture_end()
        except (RuntimeError, LaunchError) as problem:
            with suppress(RuntimeError):
                graph.capture_end()
            raise CannotCapture(f"cannot be captured: {str(problem).splitlines()[0]}") from problem
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _event_pairs(
    forward: Forward,
    rotation: Rotation,
    estimate_us: float,
    watch: Watch,
    is_slowed: Callable[[], bool],
    why: str = "",
) -> Timing:
    rotation.begin()
    rotation.flip()
    rotation.poison()

    def sample_us() -> float:
        watch()
        return event_us(lambda: rotation.call(forward))

    if estimate_us * FEWEST_SAMPLES > MOST_SECONDS * 1e6:  # so slow that three must do
        return timing(f"event pair around one call{why}", [sample_us() for _ in range(3)], 1)
    return sample_until_precise(f"event pair around one call{why}", sample_us, 1, is_slowed)


def event_us(work: Callable[[], object], times: int = 1) -> float:
    """Microseconds between two events around `work`, done so many times on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def _wall_clock(forward: Forward, rotation: Rotation, watch: Watch) -> Timing:
    """At least 5 calls and 0.2 s, at most 50 calls; slow calls stop at 3 s."""

    def sample_us() -> float:
        watch()
        start = time.perf_counter_ns()
        rotation.call(forward)
        return (time.perf_counter_ns() - start) / 1000

    fewest, most = CPU_SAMPLES
    sample_us()
    rotation.begin()
    rotation.flip()
    rotation.poison()
    samples: list[float] = []
    while len(samples) < most and sum(samples) < MOST_SECONDS * 1e6:
        if len(samples) >= fewest and sum(samples) >= CPU_SECONDS * 1e6:
            break
        samples.append(sample_us())
    return timing("wall clock of one call", samples, 1)
