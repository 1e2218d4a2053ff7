"""`call_us`: what a Python caller waits per call, back to back, with the output given."""

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
BATCH_US = 2000.0
MOST_CALLS = 200
MOST_SECONDS = 1.0
SLOW_CALL_US = 50_000.0  # such calls are not batched before they are known: the watchdog waits


def call_time(
    forward: Forward, rotation: Rotation, device: torch.device, watch: Callable[[], object] = lambda: None
) -> Timing:
    """Wall clock of synchronised batches, per call; a batch ends with the device: it is no less than device time.

    `watch` hears before each batch.
    """

    def batch_us(calls: int) -> float:
        watch()
        turns = rotation.turns(calls)
        synchronize(device)
        start = time.perf_counter_ns()
        for q, k, v, scale, causal, out in turns:
            forward(q, k, v, scale=scale, causal=causal, out=out)
        synchronize(device)
        return (time.perf_counter_ns() - start) / 1000 / calls

    estimate_us = batch_us(1)
    if device.type == "cuda" and estimate_us < SLOW_CALL_US:
        estimate_us = batch_us(20)  # the first call paid for what it set up
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
