"""Samples: when they have settled, and what they come to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from pytest_fa.measure.statistics import SETTLING_LIMIT, settle, timing


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
