"""`device_us`: the period of back-to-back calls on the device, by two clocks.

- Calls shorter than 1 ms: the slope between CUDA graphs of N and 3N calls, (t(3N) - t(N)) / 2N.  The difference cancels
  the constant cost of a replay.  Each graph is replayed once per sample, on new data.
- Calls of 1 ms and more, and calls that cannot be captured: a pair of events around a few calls.
- On the CPU: the wall-clock time of a few calls.

The candidate's process reads the events.  The judge's process has its own clock: the wall-clock time of the same
replays, from before their inputs are visible until its copies of outputs are complete.  On the CPU only the judge's
clock counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from pytest_fa.errors import FaError
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.judge.candidate import CommandTimes
from pytest_fa.judge.clocks.cpu_time import core_clock, make_calibration
from pytest_fa.judge.clocks.fresh_data import FreshData, Written
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.records.agreement import proof_limit_of, slope_limit_us
from pytest_fa.records.environment import ClockMonitor
from pytest_fa.records.sampling import precision, sample_until_precise, settle, timing
from pytest_fa.records.timing import OutsideTime, Timing
from pytest_fa.wire.commands import Run

GRAPH_US = 5_000.0  # the intended length of the shorter graph: the judge's clock is then precise to 0.5 %
EVENTS_US = 20_000.0  # the intended length of a sample by an event pair: there is no slope that cancels the message
PROBE_CALLS = 20  # in the graph that gives the estimate
MAX_CALLS = 6000  # in the shorter graph
LONG_CALL_US = 1000.0  # from this length on, calls are timed without a graph
SLOW_CALL_US = 100_000.0  # slower calls are not estimated five at a time, to stay within the watchdog's time
MAX_SECONDS = 3.0  # for all samples of slow calls
CPU_SAMPLES = (5, 50)  # fewest and most
CPU_SAMPLE_US = 10_000.0  # the intended length of a sample, of which the message to the candidate is about 1 %
CPU_CALLS = 100  # of a sample, at most
CPU_SECONDS = 0.2  # the least total of all samples, unless the most samples are reached first
CALIBRATION_EVERY = 10  # samples: the sample behind a calibration is disturbed by it
# Of the outputs of the proof sample: at least, and as a share of the GPU's memory and of what is free of it.
MIN_PROOF_BYTES, PROOF_MEMORY_SHARE, PROOF_FREE_SHARE = 2**30, 1 / 32, 1 / 8
PROOF_CALLS = 2000
PROOF_US = 20_000.0  # the intended length of the proof sample


class DeviceTime(NamedTuple):
    """What timing gave: the times, what some timed calls wrote, and the graphs that were timed."""

    timing: Timing
    outside: OutsideTime | None
    written: list[Written]
    graphs: tuple[TimedSeries, ...] = ()


class NothingLaunched(FaError):
    """A graph of three times as many calls takes no longer.  `written` is what some calls wrote, which may tell why."""

    def __init__(self, written: list[Written]) -> None:
        super().__init__("a graph of three times the calls does not take longer, so the call launches nothing")
        self.written = written


def device_time(data: FreshData, is_slowed: Callable[[], bool] = lambda: False) -> DeviceTime:
    """Measure the period of a candidate's calls.  Samples during which `is_slowed` was true are dropped."""
    if data.candidate.device.type == "cpu":
        return _wall_clock(data)
    estimate_us = _estimate_us(data)
    if estimate_us >= LONG_CALL_US:
        return _event_pairs(data, estimate_us, is_slowed)
    try:
        return _graph_slope(data, estimate_us, is_slowed)
    except CannotCapture as problem:
        return _event_pairs(data, estimate_us, is_slowed, f" ({problem})")


def _estimate_us(data: FreshData) -> float:
    """Estimate the microseconds per call, after one call that does the set-up."""
    series = TimedSeries(data, "estimate", 5, graph=False)
    estimate_us = shorter_us(series.time(1))
    if estimate_us < SLOW_CALL_US:
        estimate_us = shorter_us(series.time(5)) / 5
    if estimate_us >= LONG_CALL_US:
        return estimate_us
    try:
        probe = TimedSeries(data, "probe", PROBE_CALLS)
    except CannotCapture:
        return estimate_us
    probe.time()
    return shorter_us(probe.time()) / PROBE_CALLS


def shorter_us(timed: CommandTimes) -> float:
    """The time by which calls are planned: a candidate whose clock shows too much must not get fewer of them."""
    return min(timed.inside_us[0], timed.outside_us)


def _graph_slope(data: FreshData, estimate_us: float, is_slowed: Callable[[], bool]) -> DeviceTime:
    """Measure the period as the slope between graphs of N and 3N calls."""
    calls = max(1, min(MAX_CALLS, math.ceil(GRAPH_US / max(estimate_us, 0.1))))
    short, long = TimedSeries(data, "short", calls), TimedSeries(data, "long", 3 * calls)
    outside_us: list[float] = []
    whole_us: list[float] = []
    written: list[Written] = []

    def sample_us() -> float:
        once = short.time()
        written.append(short.written_head())
        data.require_untouched()
        thrice = long.time()
        written.append(long.written_head())
        data.require_untouched()
        outside_us.append((thrice.outside_us - once.outside_us) / (2 * calls))
        whole_us.append(thrice.outside_us / (3 * calls))
        return (thrice.inside_us[0] - once.inside_us[0]) / (2 * calls)

    def clocks_agree(samples_us: list[float]) -> bool:
        period_us = statistics.median(samples_us)
        return abs(statistics.median(outside_us) - period_us) <= slope_limit_us(period_us)

    settle(sample_us)
    for samples in (outside_us, whole_us, written):
        samples.clear()
    method = f"slope between graphs of {calls} and {3 * calls} calls, each on its own data"
    result = sample_until_precise(method, sample_us, 4 * calls, is_slowed, clocks_agree=clocks_agree)
    if min(result.samples_us) <= 0:
        raise NothingLaunched(written)
    median_us, whole = statistics.median(outside_us), statistics.median(whole_us)
    outside = OutsideTime(
        median_us,
        precision(outside_us),
        whole,
        3 * calls,
        None,
        shares_outputs=short.shares_outputs,
        publish_us=data.publish_us,
        outputs=data.outputs_of_call,
    )
    proven, proof = _with_proof(outside, data, written)
    return DeviceTime(result, proven, written, (short, long, proof))


def proof_calls(data: FreshData, call_us: float) -> int:
    """How many calls of about `call_us` the proof sample on a GPU has.

    Each has an output of its own.  The more calls, the less do the messages of a run count.
    """
    intended = math.ceil(PROOF_US / max(0.1, call_us))
    most = _proof_bytes(data.candidate.device) // max(1, data.outs[0].nbytes)
    return max(1, min(intended, PROOF_CALLS, most))


def _proof_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return MIN_PROOF_BYTES
    free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
    return max(MIN_PROOF_BYTES, int(min(PROOF_MEMORY_SHARE * memory_bytes, PROOF_FREE_SHARE * free_bytes)))


def _with_proof(outside: OutsideTime, data: FreshData, written: list[Written]) -> tuple[OutsideTime, TimedSeries]:
    """Add the time per call of a graph in which every call has an output of its own, and the number of its calls.

    Also returns that graph.  Some of the outputs, chosen at random, are judged.  One that was not written has NaN left.
    """
    count = proof_calls(data, outside.median_us)
    outs = data.new_outputs(count)
    fill_us = data.fill_us(outs) / count
    series = TimedSeries(data, "proof", count, outs)
    proof_us, heads = series.proof(count * proof_limit_of(outside, fill_us, count))
    written += heads
    shares = outside.shares_outputs or series.shares_outputs
    figures = {"proof_us": proof_us / count, "proof_calls": count, "fill_us": fill_us, "shares_outputs": shares}
    return msgspec.structs.replace(outside, **figures), series


def _event_pairs(data: FreshData, estimate_us: float, is_slowed: Callable[[], bool], why: str = "") -> DeviceTime:
    """Measure a few calls at a time with a pair of events; `why` is appended to the method's name."""
    calls = max(1, min(MAX_CALLS, math.ceil(EVENTS_US / estimate_us)))
    outs = data.own_outputs(calls)
    calls = len(outs)
    series = TimedSeries(data, "events", calls, outs, graph=False)
    outside_us: list[float] = []
    written: list[Written] = []

    def sample_us() -> float:
        timed = series.time()
        outside_us.append(timed.outside_us / calls)
        written.append(series.written_head())
        data.require_untouched()
        return timed.inside_us[0] / calls

    method = f"event pair around {calls} call{'s' if calls > 1 else ''}, each on its own data{why}"
    fewest = estimate_us * calls * 7 > MAX_SECONDS * 1e6
    if fewest:
        result = timing(method, [sample_us() for _ in range(3)], calls)
    else:
        result = sample_until_precise(method, sample_us, calls, is_slowed)
    median_us = statistics.median(outside_us)
    shares = series.shares_outputs
    outside = OutsideTime(
        median_us,
        precision(outside_us),
        median_us,
        calls,
        None,
        shares_outputs=shares,
        publish_us=data.publish_us,
        outputs=data.outputs_of_call,
    )
    return DeviceTime(result, outside, written)


def _wall_clock(data: FreshData) -> DeviceTime:
    """Measure calls on the CPU by the judge's clock, a few at a time: at least 5 samples and 0.2 s, at most 50."""
    fewest, most = CPU_SAMPLES
    estimate = TimedSeries(data, "estimate", 1, graph=False)
    estimate.time()
    calls = max(1, min(CPU_CALLS, int(CPU_SAMPLE_US / max(1.0, estimate.time().outside_us - data.publish_us))))
    outs = data.own_outputs(calls)
    calls = len(outs)
    series = TimedSeries(data, "calls", calls, outs, graph=False)
    clock_us = core_clock(data.candidate.pid)
    samples: list[float] = []
    core_samples: list[float] = []
    written: list[Written] = []
    calibration, calibration_samples = make_calibration(), []
    start = time.monotonic()
    while len(samples) < most and time.monotonic() - start < MAX_SECONDS:
        if len(samples) >= fewest and sum(samples) * calls >= CPU_SECONDS * 1e6:
            break
        core_start = clock_us()
        samples.append((series.time().outside_us - data.publish_us) / calls)
        core_samples.append((clock_us() - core_start) / calls)
        written.append(series.written_head())
        data.require_untouched()
        if len(samples) % CALIBRATION_EVERY == 1:
            calibration_samples.append(calibration())
    method = "wall clock of one call" if calls == 1 else f"wall clock of {calls} calls, each on its own data"
    result = timing(method, samples, calls)
    on_core_us, calibration_us = statistics.median(core_samples), statistics.median(calibration_samples)
    return DeviceTime(
        msgspec.structs.replace(result, on_core_us=on_core_us, calibration_us=calibration_us), None, written
    )


def clocks_while_busy(data: FreshData, device_us: float, clocks: ClockMonitor) -> object:
    """Read NVML's clocks while calls run."""
    calls = max(1, min(500, int(5000.0 / device_us)))
    series = TimedSeries(data, "clocks", calls, graph=False)
    data.redraw()
    readings: list[object] = []
    data.candidate.timed(Run(series.name, calls), lambda: readings.append(clocks.now()))
    return readings[0]
