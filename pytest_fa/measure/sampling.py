"""Samples to figures: when to stop, what to drop.  No torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from scipy.special import stdtrit  # here: an import between two samples would let the GPU idle

from pytest_fa.records.timing import Timing

SETTLED_SPREAD = 0.01
SETTLING_WINDOW = 3
SETTLING_LIMIT = 30

PRECISION = 0.0025
FEWEST_SAMPLES = 7
MOST_SAMPLES = 40
MOST_SECONDS = 1.5
MOST_DROPPED = 0.2


def settle(sample_us: Callable[[], float]) -> None:
    """Take and drop samples until three in a row lie within 1 %, at most 30: clocks ramp up and caches fill."""
    window: list[float] = []
    for _ in range(SETTLING_LIMIT):
        window = [*window[1 - SETTLING_WINDOW :], sample_us()]
        if len(window) == SETTLING_WINDOW and max(window) - min(window) <= SETTLED_SPREAD * max(window):
            return


def timing(method: str, samples_us: list[float], calls_per_sample: int) -> Timing:
    """Raw samples with their median and precision."""
    return Timing(method, tuple(samples_us), statistics.median(samples_us), calls_per_sample, precision(samples_us))


def precision(samples_us: list[float]) -> float | None:
    """The half-width of the mean's 95 % interval as a share of the mean; None of fewer than two samples."""
    count = len(samples_us)
    mean = statistics.fmean(samples_us) if samples_us else 0.0
    if count < 2 or mean <= 0:  # noqa: PLR2004
        return None
    return float(stdtrit(count - 1, 0.975)) * statistics.stdev(samples_us) / math.sqrt(count) / mean


def sample_until_precise(
    method: str,
    sample_us: Callable[[], float],
    calls_per_sample: int,
    is_slowed: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.monotonic,
) -> Timing:
    """At least 7 samples, then until the mean is known to 0.25 %, 40 are taken, or 1.5 s are over.

    A sample during which the GPU was slowed down is dropped; more than 20 % of them, and the timing says so.
    """
    kept: list[float] = []
    slow: list[float] = []
    start = now()
    while len(kept) < FEWEST_SAMPLES or _is_open(kept, now() - start):
        value = sample_us()
        (slow if is_slowed() else kept).append(value)
        if len(slow) > MOST_DROPPED * MOST_SAMPLES:
            break
    throttled = len(slow) > MOST_DROPPED * (len(slow) + len(kept))
    found = timing(method, kept or slow, calls_per_sample)
    return Timing(
        found.method, found.samples_us, found.median_us, calls_per_sample, found.precision, len(slow), throttled
    )


def _is_open(samples_us: list[float], seconds: float) -> bool:
    if len(samples_us) >= MOST_SAMPLES or seconds >= MOST_SECONDS:
        return False
    known = precision(samples_us)
    return known is None or known > PRECISION
