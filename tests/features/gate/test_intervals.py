"""Confidence intervals and p-values over processes, compared with tabulated values and with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_fa.features.gate.intervals import any_rejected, bootstrap_interval, detectable_effect, p_above, t_interval


def test_t_interval_is_students() -> None:
    """The interval of five samples follows from mean 3, standard error sqrt(0.5) and t(0.975, 4) = 2.776."""
    interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.95)
    assert interval.mean == 3.0
    assert [interval.low, interval.high] == pytest.approx(
        [3 - 2.7764 * math.sqrt(0.5), 3 + 2.7764 * math.sqrt(0.5)], abs=1e-3
    )


@pytest.mark.parametrize(("samples", "low", "high"), [([], -math.inf, math.inf), ([1.0], -math.inf, math.inf)])
def test_few_samples_are_unbounded(samples: list[float], low: float, high: float) -> None:
    """The interval of fewer than two samples is unbounded."""
    interval = t_interval(samples, 0.95)
    assert (interval.low, interval.high) == (low, high)


def test_no_spread_is_a_point() -> None:
    """The interval of equal samples has width zero."""
    interval = t_interval([0.5, 0.5, 0.5], 0.995)
    assert (interval.mean, interval.low, interval.high) == (0.5, 0.5, 0.5)


def test_nan_decides_nothing() -> None:
    """With a NaN sample every comparison with the limits is false, and the p-value is 1."""
    interval = t_interval([0.1, math.nan, 0.1], 0.95)
    assert (interval.low < 1, interval.high < 1) == (False, False)
    assert p_above([0.1, math.nan, 0.1], 0.0) == 1.0


def test_bootstrap_covers_processes_not_blocks() -> None:
    """The width of the bootstrap interval follows the spread of process means, not the number of blocks."""
    draw = np.random.default_rng(0)
    rows = [list(mean + draw.normal(0, 1e-4, 50)) for mean in draw.normal(0, 0.01, 12)]
    interval = bootstrap_interval(rows, 0.95, seed=1)
    assert 0.005 < interval.high - interval.low < 0.02
    assert interval == bootstrap_interval(rows, 0.95, seed=1)


def test_holm_steps_down() -> None:
    """The smallest p is compared with level / n, the next with level / (n - 1), until one is not rejected."""
    assert any_rejected([0.01, 0.04, 0.03], 0.05) == [True, False, False]
    assert any_rejected([0.01, 0.02, 0.03], 0.05) == [True, True, True]
    assert any_rejected([], 0.05) == []


def test_p_is_of_the_right_side() -> None:
    """Samples well above the limit have a small p-value, samples below it a large one."""
    assert p_above([0.1, 0.11, 0.12], 0.0) < 0.01
    assert p_above([-0.1, -0.11, -0.12], 0.0) > 0.99
    assert [p_above([0.1, 0.1], 0.0), p_above([0.0, 0.0], 0.1)] == [0.0, 1.0]


def test_the_detectable_effect_shrinks_with_processes() -> None:
    """With a standard deviation of 0.8 %, 12 processes detect about 1 %, and 6 processes about 2 %."""
    few, many = (detectable_effect(0.008, count, 0.995) for count in (6, 12))
    assert (0.015 < few < 0.022, 0.008 < many < 0.011) == (True, True)
