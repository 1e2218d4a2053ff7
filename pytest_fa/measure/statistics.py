"""Samples to figures.  No torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from pytest_fa.report.record import Timing

SETTLED_SPREAD = 0.01
SETTLING_WINDOW = 3
SETTLING_LIMIT = 30


def settle(sample_us: Callable[[], float]) -> None:
    """Take and drop samples until three in a row lie within 1 %, at most 30: clocks ramp up and caches fill."""
    window: list[float] = []
    for _ in range(SETTLING_LIMIT):
        window = [*window[1 - SETTLING_WINDOW :], sample_us()]
        if len(window) == SETTLING_WINDOW and max(window) - min(window) <= SETTLED_SPREAD * max(window):
            return


def timing(method: str, samples_us: list[float], calls_per_sample: int) -> Timing:
    """Raw samples with their median."""
    return Timing(method, tuple(samples_us), statistics.median(samples_us), calls_per_sample)
