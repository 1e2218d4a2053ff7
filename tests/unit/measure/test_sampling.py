"""Samples: when they have settled, and what they come to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest

from pytest_fa.measure.sampling import (
    FEWEST_SAMPLES,
    MOST_SAMPLES,
    SETTLING_LIMIT,
    precision,
    sample_until_precise,
    settle,
    timing,
)


def taken(samples: Iterable[float]) -> int:
    """How many samples `settle` takes."""
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
    """Samples are dropped until the last three lie within 1 % of their largest."""
    assert taken(samples) == count


@pytest.mark.parametrize("samples", [[10.0, 20.0], [10.0, 10.0, 11.0]])
def test_gives_up_settling(samples: list[float]) -> None:
    """What never settles is sampled thirty times and no more."""
    assert taken(itertools.cycle(samples)) == SETTLING_LIMIT == 30


@pytest.mark.parametrize(
    ("samples", "median"),
    [([3.0], 3.0), ([5.0, 1.0, 3.0], 3.0), ([4.0, 1.0, 3.0, 2.0], 2.5), ([1.0, 1.0, 1000.0], 1.0)],
)
def test_timing(samples: list[float], median: float) -> None:
    """Every raw sample is kept in its order beside the median, the method and the calls per sample."""
    result = timing("slope", samples, 40)

    assert (result.method, result.samples_us, result.median_us, result.calls_per_sample) == (
        "slope",
        tuple(samples),
        median,
        40,
    )


def test_precision_is_students() -> None:
    """Half the 95 % interval over the mean: t of 0.975 with 3 degrees is 3.182."""
    assert precision([9.0, 10.0, 10.0, 11.0]) == pytest.approx(3.1824 * math.sqrt(2 / 3) / 2 / 10, rel=1e-4)
    assert [precision([]), precision([1.0]), precision([0.0, 0.0])] == [None, None, None]


def test_equal_samples_are_enough_at_once() -> None:
    """Where nothing scatters, the fewest samples do."""
    found = sample_until_precise("m", lambda: 5.0, 3, now=lambda: 0.0)
    assert (found.samples_us, found.precision, found.dropped, found.is_throttled) == (
        (5.0,) * FEWEST_SAMPLES,
        0,
        0,
        False,
    )


def test_scatter_is_followed_up_to_a_limit() -> None:
    """Samples that scatter by 20 % are taken until there are 40; the precision that was reached is said."""
    turns = itertools.cycle((9.0, 11.0))
    found = sample_until_precise("m", lambda: next(turns), 1, now=lambda: 0.0)
    assert len(found.samples_us) == MOST_SAMPLES
    assert found.precision == pytest.approx(0.0324, abs=1e-3)


def test_time_ends_it() -> None:
    """Slow samples stop when the time is over, but not below the fewest."""
    clock = itertools.count(0.0, 2.0)
    turns = itertools.cycle((9.0, 11.0))
    found = sample_until_precise("m", lambda: next(turns), 1, now=lambda: next(clock))
    assert len(found.samples_us) == FEWEST_SAMPLES


@pytest.mark.parametrize(("every", "throttled"), [(6, False), (2, True), (1, True)])
def test_slowed_samples_are_dropped_and_counted(every: int, *, throttled: bool) -> None:
    """One in six is dropped, every second one is too many; where all are slow they are shown and not trusted."""
    count = itertools.count(1)
    found = sample_until_precise("m", lambda: 5.0, 1, lambda: next(count) % every == 0, now=lambda: 0.0)
    assert (found.dropped > 0, found.is_throttled, len(found.samples_us) > 0) == (True, throttled, True)
