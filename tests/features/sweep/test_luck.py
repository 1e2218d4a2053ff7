"""The luck of a search: the expected value of the best of N equal draws."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from pytest_fa.features.sweep.luck import expected_largest, pooled_sd


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (200, 2.746042)]
)
def test_the_expected_largest_draw(count: int, expected: float) -> None:
    """For two and three draws it is known exactly; for 200 it is that of the tables of order statistics."""
    assert expected == pytest.approx(expected_largest(count), abs=1e-6)


def test_it_is_what_draws_give() -> None:
    """The mean of the largest of 50 draws agrees."""
    draw = random.Random(0)  # noqa: S311  # no secret
    largest = [max(draw.gauss(0, 1) for _ in range(50)) for _ in range(2000)]
    assert statistics.fmean(largest) == pytest.approx(expected_largest(50), abs=0.05)


def test_no_draw_has_no_largest() -> None:
    """Zero draws are an error."""
    with pytest.raises(ValueError, match="0 draws"):
        expected_largest(0)


def test_the_pooled_deviation() -> None:
    """Groups with different means share one deviation; groups of one value have none."""
    groups = [(1.0, 2.0, 3.0), (11.0, 13.0), (5.0,)]
    assert pooled_sd(groups) == pytest.approx(math.sqrt((2.0 + 2.0) / 3))
    assert pooled_sd([(1.0,), ()]) is None
