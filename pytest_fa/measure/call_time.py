"""`call_us`: the wall-clock time per call that a Python caller sees, for back-to-back calls with `out` given.

It is taken in batches that end with a synchronization, so it includes Python, the launch and the kernel.  It is
therefore at least the period on the device, `device_us`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from pytest_fa.measure.rotation import Rotation
from pytest_fa.measure.sampling import settle, timing
from pytest_fa.records.timing import Timing
from pytest_fa.run.device import synchronize
from pytest_fa.run.forward import Forward

BATCHES = 20
BATCH_US = 2000.0  # the intended length of a batch
MOST_CALLS = 200  # in a batch
MOST_SECONDS = 1.0  # for all batches, of which there are at least three
SLOW_CALL_US = 50_000.0  # slower calls are not batched for the estimate, to stay within the watchdog's time


def call_time(
    forward: Forward, rotation: Rotation, device: torch.device, before_launch: Callable[[], object] = lambda: None
) -> Timing:
    """Measure the wall-clock time per call in synchronized batches of calls.

    `before_launch` is called before each batch, because a batch may hang.
    """

    def batch_us(calls: int) -> float:
        before_launch()
        arguments = rotation.turns(calls)
        synchronize(device)
        start = time.perf_counter_ns()
        for q, k, v, scale, causal, out in arguments:
            forward(q, k, v, scale=scale, causal=causal, out=out)
        synchronize(device)
        return (time.perf_counter_ns() - start) / 1000 / calls

    estimate_us = batch_us(1)
    if device.type == "cuda" and estimate_us < SLOW_CALL_US:
        estimate_us = batch_us(20)  # the first call included one-time set-up
    elif device.type == "cpu":
        estimate_us = batch_us(1)
    calls = max(1, min(MOST_CALLS, int(BATCH_US / estimate_us)))
    batches = max(3, min(BATCHES, int(MOST_SECONDS * 1e6 / (calls * estimate_us))))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if calls > 1:
            settle(lambda: batch_us(calls))
        samples = [batch_us(calls) for _ in range(batches)]
    finally:
        if was_enabled:
            gc.enable()
    return timing(f"wall clock of batches of {calls} calls", samples, calls)
