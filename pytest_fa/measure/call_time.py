"""`call_us`: the wall-clock time per call that a Python caller sees, for back-to-back calls with `out` given.

It is the slope between batches of n and 3n calls by the judge's clock, so it includes Python, the launch and the
kernel, but not the message that starts a batch.  Each batch reads new data.  The time is at least the period on the
device, `device_us`.  On the CPU it is the time of a batch.
"""

from __future__ import annotations

from pytest_fa.candidate.commands import Run
from pytest_fa.measure.cpu_time import CPU_THREADS
from pytest_fa.measure.fresh_data import FreshData, Written
from pytest_fa.measure.sampling import settle, timing
from pytest_fa.records.timing import Timing

BATCHES = 20
BATCH_US = 2000.0  # the intended length of the shorter batch
CPU_BATCH_US = 10_000.0  # on the CPU, where a batch's whole time counts
MOST_CALLS = 200  # in the shorter batch
MOST_SECONDS = 1.0  # for all batches, of which there are at least three


def call_time(data: FreshData) -> tuple[Timing, list[Written]]:
    """Measure the wall-clock time per call; also return what one of the calls wrote."""
    on_cpu = data.candidate.device.type == "cpu"
    series = data.series(3 * MOST_CALLS)
    data.candidate.prepare("call", series, CPU_THREADS if on_cpu else None)

    def run_us(calls: int) -> float:
        data.redraw()
        return data.candidate.timed(Run("call", calls)).outside_us

    run_us(1)
    estimate_us = run_us(3) / 3
    intended_us = CPU_BATCH_US if on_cpu else BATCH_US
    calls = max(1, min(MOST_CALLS, int(intended_us / estimate_us)))
    batches = max(3, min(BATCHES, int(MOST_SECONDS * 1e6 / (4 * calls * estimate_us))))
    if on_cpu:
        samples = [run_us(calls) / calls for _ in range(batches)]
        written = [data.written_head(series, calls, data.outs)]
        return timing(f"wall clock of batches of {calls} calls", samples, calls), written

    def sample_us() -> float:
        short_us = run_us(calls)
        return max(0.0, run_us(3 * calls) - short_us) / (2 * calls)

    if calls > 1:
        settle(sample_us)
    samples = [sample_us() for _ in range(batches)]
    data.redraw()
    timed = data.candidate.timed(Run("call", calls))
    outs = data.candidate.outputs_of("call", data.outs, timed.allocated)
    written = [data.written_head(series, calls, outs)]
    data.require_untouched()
    method = f"slope between batches of {calls} and {3 * calls} calls"
    return timing(method, [max(sample, 1e-3) for sample in samples], 4 * calls), written
