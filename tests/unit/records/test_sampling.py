"""Sampling: when samples have settled, how many are taken, and their statistics."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable

import pytest
from scipy.special import stdtrit

from pytest_fa.records.sampling import (
    FEWEST_SAMPLES,
    MAX_SAMPLES,
    SETTLING_LIMIT,
    T_QUANTILES,
    precision,
    sample_until_precise,
    settle,
    timing,
)


def count_taken(samples: Iterable[float]) -> int:
    """The number of samples that `settle` takes."""
    count = 0

    def sample_us() -> float:
        nonlocal count
        count += 1
        return next(source)

    source = iter(samples)
    settle(sample_us)
    return count


@pytest.mark.parametrize(
    ("samples", "count"),
    [
        ([10.0, 10.0, 10.0], 3),
        ([100.0, 100.0, 99.0], 3),
        ([100.0, 100.0, 98.9, 98.9, 98.9], 5),
        ([99.0, 100.0, 100.0], 3),
        ([30.0, 20.0, 15.0, 10.05, 10.0, 10.02], 6),
        ([10.0, 10.0, 20.0, 10.0, 10.0, 10.0], 6),
    ],
    ids=["at once", "at the edge", "beyond the edge", "rising", "clock ramps up", "one outlier"],
)
def test_settles_at_three_within_one_percent(samples: list[float], count: int) -> None:
    """Samples are dropped until the last three differ by at most 1 % of the largest of them."""
    assert count_taken(samples) == count


@pytest.mark.parametrize("samples", [[10.0, 20.0], [10.0, 10.0, 11.0]])
def test_gives_up_settling(samples: list[float]) -> None:
    """If samples never settle, 30 are taken."""
    assert count_taken(itertools.cycle(samples)) == SETTLING_LIMIT == 30


@pytest.mark.parametrize(
    ("samples", "median"),
    [([3.0], 3.0), ([5.0, 1.0, 3.0], 3.0), ([4.0, 1.0, 3.0, 2.0], 2.5), ([1.0, 1.0, 1000.0], 1.0)],
)
def test_timing(samples: list[float], median: float) -> None:
    """A timing has all raw samples in order, their median, the method and the calls per sample."""
    result = timing("slope", samples, 40)

    assert (result.method, result.samples_us, result.median_us, result.calls_per_sample) == (
        "slope",
        tuple(samples),
        median,
        40,
    )


def test_precision_is_the_t_interval() -> None:
    """Precision is half the 95 % interval of the mean over the mean; Student's t at 0.975 for 4 samples is 3.182."""
    assert precision([9.0, 10.0, 10.0, 11.0]) == pytest.approx(3.1824 * math.sqrt(2 / 3) / 2 / 10, rel=1e-4)
    assert [precision([]), precision([1.0]), precision([0.0, 0.0])] == [None, None, None]


def test_equal_samples_need_the_fewest() -> None:
    """If all samples are equal, the fewest samples are taken."""
    result = sample_until_precise("m", lambda: 5.0, 3, now=lambda: 0.0)
    assert (result.samples_us, result.precision, result.dropped, result.is_throttled) == (
        (5.0,) * FEWEST_SAMPLES,
        0,
        0,
        False,
    )


def test_scattered_samples_are_limited_by_number() -> None:
    """Of samples that scatter by 20 %, 40 are taken, and the result has the precision that was reached."""
    samples = itertools.cycle((9.0, 11.0))
    result = sample_until_precise("m", lambda: next(samples), 1, now=lambda: 0.0)
    assert len(result.samples_us) == MAX_SAMPLES
    assert result.precision == pytest.approx(0.0324, abs=1e-3)


def test_scattered_samples_are_limited_by_time() -> None:
    """After the time limit only the fewest samples are still taken."""
    clock = itertools.count(0.0, 2.0)
    samples = itertools.cycle((9.0, 11.0))
    result = sample_until_precise("m", lambda: next(samples), 1, now=lambda: next(clock))
    assert len(result.samples_us) == FEWEST_SAMPLES


@pytest.mark.parametrize(("every", "throttled"), [(6, False), (2, True), (1, True)])
def test_slowed_samples_are_dropped_and_counted(every: int, *, throttled: bool) -> None:
    """Samples of a slowed GPU are dropped; more than 20 % of them make the result throttled, even if all are slow."""
    count = itertools.count(1)
    result = sample_until_precise("m", lambda: 5.0, 1, lambda: next(count) % every == 0, now=lambda: 0.0)
    assert (result.dropped > 0, result.is_throttled, len(result.samples_us) > 0) == (True, throttled, True)


def test_quantiles_are_those_of_scipy() -> None:
    """The quantiles that are written down, and one for more samples than they cover, are those of scipy."""
    expected = [float(stdtrit(degrees, 0.975)) for degrees in range(1, len(T_QUANTILES) + 1)]
    assert pytest.approx(expected, rel=1e-8) == list(T_QUANTILES)  # earlier versions of scipy are less precise
    samples = [1.0, 2.0] * len(T_QUANTILES)
    half_width = float(stdtrit(len(samples) - 1, 0.975)) * statistics.stdev(samples) / math.sqrt(len(samples))
    assert precision(samples) == pytest.approx(half_width / statistics.fmean(samples), rel=1e-12)
