"""`device_us`: the period of back-to-back calls on the device.

- Calls shorter than 1 ms: the slope between CUDA graphs of N and 3N calls, (t(3N) - t(N)) / 2N.  The difference cancels
  the constant cost of a replay.
- Calls of 1 ms and more, and calls that cannot be captured: one pair of events around each call.
- On the CPU: the wall-clock time of one call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import torch

from pytest_fa.errors import FaError, LaunchError
from pytest_fa.measure.cpu_time import make_calibration
from pytest_fa.measure.rotation import Rotation
from pytest_fa.measure.sampling import FEWEST_SAMPLES, sample_until_precise, settle, timing
from pytest_fa.records.environment import ClockWatch
from pytest_fa.records.timing import Timing
from pytest_fa.run.forward import Forward

BeforeLaunch = Callable[[], object]  # called before work that may hang; it restarts the watchdog's time

SAMPLE_MS = 20.0  # the least length of a sample: replays of both graphs
REPLAYS = 10  # of each graph in a sample, at least
GRAPH_US = 200.0  # the intended length of the shorter graph
PROBE_CALLS = 20  # in the graph that gives the estimate
MOST_CALLS = 400  # in the shorter graph
SLOW_CALL_US = 100_000.0  # slower calls are not estimated five at a time, to stay within the watchdog's time
LONG_CALL_US = 1000.0  # from this length on, calls are timed by one pair of events each
MOST_SECONDS = 3.0  # for all samples of slow calls
CPU_SAMPLES = (5, 50)  # fewest and most
CALIBRATION_EVERY = 10  # samples: the sample behind a calibration is disturbed by it
CPU_SECONDS = 0.2  # the least total of all samples, unless the most samples are reached first


class CannotCapture(FaError):
    """A call cannot be part of a CUDA graph; the message gives the reason."""


def device_time(
    forward: Forward,
    rotation: Rotation,
    device: torch.device,
    before_launch: BeforeLaunch = lambda: None,
    clocks: ClockWatch | None = None,
) -> Timing:
    """Measure the period of `forward` on the rotation's buffers.

    Afterwards, `rotation.outputs` are the outputs of timed calls.  `before_launch` is called before work that may hang.
    Samples during which `clocks` saw the GPU slowed down are dropped.
    """
    is_slowed = clocks.is_slowed if clocks else lambda: False
    if device.type == "cpu":
        return _wall_clock(forward, rotation, before_launch)
    before_launch()
    estimate_us = event_us(lambda: rotation.call(forward))
    if estimate_us < SLOW_CALL_US:
        before_launch()
        estimate_us = event_us(lambda: rotation.call(forward), 5) / 5
    before_launch()
    try:
        estimate_us = _graph_estimate_us(forward, rotation, estimate_us)
    except CannotCapture as problem:
        return _event_pairs(forward, rotation, estimate_us, before_launch, is_slowed, f" ({problem})")
    if estimate_us >= LONG_CALL_US:
        return _event_pairs(forward, rotation, estimate_us, before_launch, is_slowed)
    return _graph_slope(forward, rotation, estimate_us, before_launch, is_slowed)


def _graph_slope(
    forward: Forward, rotation: Rotation, estimate_us: float, before_launch: BeforeLaunch, is_slowed: Callable[[], bool]
) -> Timing:
    """Measure the period as the slope between graphs of N and 3N calls."""
    calls = max(1, min(MOST_CALLS, math.ceil(GRAPH_US / estimate_us)))
    once, thrice = (capture(lambda: rotation.call(forward), calls * times, rotation.begin) for times in (1, 3))
    once.replay()
    thrice.replay()
    pair_ms = (event_us(once.replay) + event_us(thrice.replay)) / 1000
    replays = max(REPLAYS, math.ceil(SAMPLE_MS / pair_ms))

    def sample_us(replays: int = replays) -> float:
        before_launch()
        short, long = event_us(once.replay, replays), event_us(thrice.replay, replays)
        return (long - short) / (2 * calls * replays)

    settle(lambda: sample_us(REPLAYS))
    rotation.flip()
    rotation.poison()
    method = f"slope between graphs of {calls} and {3 * calls} calls"  # a sample ends with the graph captured last
    result = sample_until_precise(method, sample_us, 4 * calls * replays, is_slowed)
    if min(result.samples_us) <= 0:
        raise FaError("a graph of three times the calls does not take longer, so the call launches nothing")
    return result


def _graph_estimate_us(forward: Forward, rotation: Rotation, eager_us: float) -> float:
    """Estimate the microseconds per call from a graph, because eager calls of short kernels are bound by launches."""
    calls = PROBE_CALLS if eager_us < GRAPH_US / 2 else 1
    probe = capture(lambda: rotation.call(forward), calls, rotation.begin)
    probe.replay()
    replays = REPLAYS if eager_us < LONG_CALL_US else 1
    return event_us(probe.replay, replays) / (calls * replays)


def capture(
    call: Callable[[], object], calls: int, begin: Callable[[], object] = lambda: None, *, keep_graph: bool = False
) -> torch.cuda.CUDAGraph:
    """Capture `calls` calls in a row as a CUDA graph, on a new stream.  Raises `CannotCapture` with CUDA's message.

    One call is made before the capture.  `begin` is called after it, before the captured calls.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # the set-up of a first call on a stream is not captured
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
    before_launch: BeforeLaunch,
    is_slowed: Callable[[], bool],
    why: str = "",
) -> Timing:
    """Measure each call with a pair of events; `why` is appended to the method's name."""
    rotation.begin()
    rotation.flip()
    rotation.poison()

    def sample_us() -> float:
        before_launch()
        return event_us(lambda: rotation.call(forward))

    if estimate_us * FEWEST_SAMPLES > MOST_SECONDS * 1e6:  # so slow that only three samples are taken
        return timing(f"event pair around one call{why}", [sample_us() for _ in range(3)], 1)
    return sample_until_precise(f"event pair around one call{why}", sample_us, 1, is_slowed)


def event_us(work: Callable[[], object], times: int = 1) -> float:
    """Microseconds between two events on the current stream, with `work` called `times` times in between."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def _wall_clock(forward: Forward, rotation: Rotation, before_launch: BeforeLaunch) -> Timing:
    """Measure single calls on the CPU: at least 5 calls and 0.2 s, at most 50 calls, and no new call after 3 s."""

    def sample_us() -> tuple[float, float]:
        before_launch()
        start, core_start = time.perf_counter_ns(), time.process_time_ns()
        rotation.call(forward)
        core_us = (time.process_time_ns() - core_start) / 1000
        return (time.perf_counter_ns() - start) / 1000, core_us

    fewest, most = CPU_SAMPLES
    sample_us()
    rotation.begin()
    rotation.flip()
    rotation.poison()
    samples: list[float] = []
    core_samples: list[float] = []
    calibration, calibration_samples = make_calibration(), []
    while len(samples) < most and sum(samples) < MOST_SECONDS * 1e6:
        if len(samples) >= fewest and sum(samples) >= CPU_SECONDS * 1e6:
            break
        elapsed_us, core_us = sample_us()
        samples.append(elapsed_us)
        core_samples.append(core_us)
        if len(samples) % CALIBRATION_EVERY == 1:
            calibration_samples.append(calibration())
    result = timing("wall clock of one call", samples, 1)
    on_core_us, calibration_us = statistics.median(core_samples), statistics.median(calibration_samples)
    return msgspec.structs.replace(result, on_core_us=on_core_us, calibration_us=calibration_us)
