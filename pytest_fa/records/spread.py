"""Whether a time on the CPU is noisy, and whether the ratio of two such times means anything.

On the CPU, the operating system and other programs delay calls.  Each time therefore has a range.  Its lower end is the
lower quartile of the samples, or the time that the process ran on a core if that is shorter: without other programs,
the call could have been that fast.  Its upper end is the upper quartile.  A calibration, a fixed piece of work that is
timed between the calls, shows how fast the machine was meanwhile: its clock, and what else ran on the same core.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from pytest_fa.records.timing import Speed, Timing

NOISY = 1.25  # upper end of a range / lower end, from which a time is noisy
WIDEST = 1.5  # span from which a ratio is not shown
STEADY = 1.08  # span below which a ratio is shown although it may be on either side of 1
MIN_US = 1e-3  # the least lower end of a range, so that ratios are finite


def range_us(speed: Speed) -> tuple[float, float]:
    """The range of a time on the CPU in microseconds, from the samples of both of its measurements."""
    lower, upper = zip(*(_quartiles(timing) for timing in (speed.device, speed.call)), strict=True)
    least = min(*lower, speed.device.median_us)
    if speed.device.on_core_us is not None:
        least = min(least, speed.device.on_core_us)
    return max(least, MIN_US), max(*upper, speed.device.median_us)


def is_noisy(speed: Speed, least_calibration_us: float | None = None) -> bool:
    """Whether a time was measured on the CPU and its range is wider than 25 %, or the machine was that much slower.

    `least_calibration_us` is the least calibration time of all times with which this one is compared.
    """
    own = speed.device.calibration_us
    was_slow = bool(own and least_calibration_us and own > NOISY * least_calibration_us)
    return speed.is_on_cpu and (_width([(1.0, speed)]) > NOISY or was_slow)


def is_clear_ratio(speed: Speed, other: Speed) -> bool:
    """Whether the ratio of two times means anything.  Between two times on the GPU it always does."""
    return is_clear(speed.device.median_us / other.device.median_us, span_of_ratio(speed, other))


def is_clear(ratio: float, span: float) -> bool:
    """Whether a ratio with this span means anything.

    It is clear if its span is below 1.5 and less than the ratio itself, or than its inverse if that is above 1.  Then
    every possible ratio is on the same side of 1.  A ratio with a span below 1.08 is always clear.
    """
    return span < min(WIDEST, max(ratio, 1 / ratio, STEADY))


def span_of_ratio(speed: Speed, other: Speed) -> float:
    """The largest possible ratio of two times divided by the smallest; 1 on the GPU.

    The possible ratios are those of all times in the two ranges.  If the calibration shows that the machine was not
    equally fast, the span is larger by that factor.
    """
    return span_of_sums([(1.0, speed, other)])


def span_of_sums(terms: Sequence[tuple[float, Speed, Speed]]) -> float:
    """The same of two sums; each term is a weight, a time of the one sum and a time of the other."""
    width = _width((weight, speed) for weight, speed, _ in terms)
    other_width = _width((weight, other) for weight, _, other in terms)
    return width * other_width * max(_slowdown(speed, other) for _, speed, other in terms)


def _slowdown(speed: Speed, other: Speed) -> float:
    """How much slower the machine was during one of two times, as far as both have a calibration."""
    known = [us for us in (speed.device.calibration_us, other.device.calibration_us) if us]
    return max(known) / min(known) if len(known) > 1 else 1.0


def _width(terms: Iterable[tuple[float, Speed]]) -> float:
    """The upper end of the range of a sum of weighted times, divided by its lower end; 1 on the GPU."""
    ends = [(weight * lower, weight * upper) for weight, speed in terms for lower, upper in [_ends(speed)]]
    lower_us, upper_us = map(sum, zip(*ends, strict=True))
    return upper_us / lower_us


def _ends(speed: Speed) -> tuple[float, float]:
    return range_us(speed) if speed.is_on_cpu else (speed.device.median_us,) * 2


def _quartiles(timing: Timing) -> tuple[float, float]:
    """The lower and the upper quartile of the samples; the median twice for a single sample."""
    if len(timing.samples_us) < 2:  # noqa: PLR2004
        return timing.median_us, timing.median_us
    lower, _, upper = statistics.quantiles(timing.samples_us, n=4, method="inclusive")
    return lower, upper
