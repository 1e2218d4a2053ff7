"""Sampling: when samples have settled, when there are enough, and which are dropped.  No torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from scipy.special import stdtrit  # not imported later: the GPU would idle between two samples

from pytest_fa.records.timing import Timing

SETTLED_SPREAD = 0.01  # relative
SETTLING_WINDOW = 3  # samples
SETTLING_LIMIT = 30  # samples

PRECISION = 0.0025  # relative half-width of the mean's 95 % interval
FEWEST_SAMPLES = 7
MOST_SAMPLES = 40
MOST_SECONDS = 1.5
MOST_DROPPED = 0.2  # fraction of the samples


def settle(sample_us: Callable[[], float]) -> None:
    """Take and drop samples until three in a row agree within 1 %, at most 30: clocks ramp up and caches fill."""
    window: list[float] = []
    for _ in range(SETTLING_LIMIT):
        window = [*window[1 - SETTLING_WINDOW :], sample_us()]
        if len(window) == SETTLING_WINDOW and max(window) - min(window) <= SETTLED_SPREAD * max(window):
            return


def timing(method: str, samples_us: list[float], calls_per_sample: int) -> Timing:
    """The `Timing` of raw samples, with their median and precision."""
    return Timing(method, tuple(samples_us), statistics.median(samples_us), calls_per_sample, precision(samples_us))


def precision(samples_us: list[float]) -> float | None:
    """The half-width of the mean's 95 % interval, relative to the mean; None for fewer than two samples."""
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
    """Take 7 samples and then more until the mean is known to 0.25 %, 40 samples are taken or 1.5 s have passed.

    Samples during which the GPU was slowed down are dropped.  If more than 20 % are, `is_throttled` is True.
    """
    valid: list[float] = []
    slow: list[float] = []
    start = now()
    while len(valid) < FEWEST_SAMPLES or _needs_more(valid, now() - start):
        value = sample_us()
        (slow if is_slowed() else valid).append(value)
        if len(slow) > MOST_DROPPED * MOST_SAMPLES:
            break
    throttled = len(slow) > MOST_DROPPED * (len(slow) + len(valid))
    result = timing(method, valid or slow, calls_per_sample)
    return Timing(
        result.method, result.samples_us, result.median_us, calls_per_sample, result.precision, len(slow), throttled
    )


def _needs_more(samples_us: list[float], seconds: float) -> bool:
    """Whether the mean is not precise enough yet, and samples and time remain."""
    if len(samples_us) >= MOST_SAMPLES or seconds >= MOST_SECONDS:
        return False
    reached = precision(samples_us)
    return reached is None or reached > PRECISION
