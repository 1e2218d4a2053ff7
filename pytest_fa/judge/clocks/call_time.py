"""`call_us`: the wall-clock time per call that a Python caller sees, for back-to-back calls with `out` given.

It is the slope between batches of n and 3n calls by the judge's clock, so it includes Python, the launch and the
kernel, but not the message that starts a batch.  It is at least the period on the device, `device_us`.  On the CPU it
is the time of a batch.  Each batch has data of its own, so that no result can be kept.
"""

from __future__ import annotations

from pytest_fa.gpu.inputs import Output
from pytest_fa.judge.clocks.fresh_data import FreshData, Written
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.records.sampling import timing
from pytest_fa.records.timing import Timing

BATCHES = 7
BATCH_US = 3000.0  # the intended length of the shorter batch; the length of a message varies by about 0.1 ms
CPU_BATCH_US = 10_000.0  # on the CPU, where a batch's whole time counts
ESTIMATE_CALLS = 30
DELAYED_US = 100_000.0  # no message is delayed by more
MIN_CALL_US = 1.0  # no call from Python takes less
MAX_CALLS = 1000  # in the shorter batch
MAX_CPU_CALLS = 200
HEADS_JUDGED = 16  # of the calls of the last batches, one each
MAX_SECONDS = 1.0  # for all batches, of which there are at least three


def call_time(data: FreshData) -> tuple[Timing, list[Written]]:
    """Measure the wall-clock time per call; also return what one call of each of the last batches wrote."""
    on_cpu = data.candidate.device.type == "cpu"
    batches = _Batches(data, data.own_outputs(MAX_CPU_CALLS) if on_cpu else data.outs)
    estimate_us = max(MIN_CALL_US, batches.estimate_us())
    intended_us, most = (CPU_BATCH_US, len(batches.outs)) if on_cpu else (BATCH_US, MAX_CALLS)
    calls = max(1, min(most, int(intended_us / estimate_us)))
    count = max(3, min(BATCHES, int(MAX_SECONDS * 1e6 / (4 * calls * estimate_us))))
    batches.run_us(calls)
    if on_cpu:
        samples = [batches.run_us(calls) / calls for _ in range(count)]
        return timing(f"wall clock of batches of {calls} calls", samples, calls), batches.written

    def sample_us() -> float:
        short_us = batches.run_us(calls)
        return max(0.0, batches.run_us(3 * calls) - short_us) / (2 * calls)

    samples = [sample_us() for _ in range(count)]
    method = f"slope between batches of {calls} and {3 * calls} calls"
    return timing(method, [max(sample, 1e-3) for sample in samples], 4 * calls), batches.written


class _Batches:
    """Batches of calls, each on its own data, and what one call of each batch wrote."""

    def __init__(self, data: FreshData, outs: list[Output]) -> None:
        self._data, self.outs = data, outs
        self._longest = len(outs) if data.candidate.device.type == "cpu" else 3 * MAX_CALLS
        self._series = TimedSeries(data, "call", self._longest, outs, graph=False)
        self.written: list[Written] = []

    def estimate_us(self) -> float:
        """Estimate the time of a call from two batches, after a call that does the set-up."""
        self.run_us(1)
        one_us = self.run_us(1)
        if BATCH_US < one_us < DELAYED_US:  # a slow call, or a message that a busy machine delayed
            one_us = min(one_us, self.run_us(1), self.run_us(1))
        if one_us > BATCH_US:
            return one_us
        calls = min(ESTIMATE_CALLS, self._longest)
        return (self.run_us(calls) - one_us) / max(1, calls - 1)

    def run_us(self, calls: int) -> float:
        """The time of a batch by the judge's clock.  Raises `WrongResult` if a call changed an input."""
        timed = self._series.time(calls)
        self._data.require_untouched()
        self.written = [*self.written[1 - HEADS_JUDGED :], self._series.written_head()]
        return timed.outside_us - self._data.publish_us
