"""Intervals and tests over processes, against figures from tables and by their own sense."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_fa.gate.intervals import any_rejected, bootstrap_interval, detectable_effect, p_above, t_interval


def test_t_interval_is_students() -> None:
    """Five samples: mean 3, standard error sqrt(0.5), t of 0.975 with 4 degrees 2.776."""
    found = t_interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.95)
    assert found.mean == 3.0
    assert [found.low, found.high] == pytest.approx(
        [3 - 2.7764 * math.sqrt(0.5), 3 + 2.7764 * math.sqrt(0.5)], abs=1e-3
    )


@pytest.mark.parametrize(("samples", "low", "high"), [([], -math.inf, math.inf), ([1.0], -math.inf, math.inf)])
def test_few_samples_say_nothing(samples: list[float], low: float, high: float) -> None:
    """Fewer than two samples leave everything open."""
    found = t_interval(samples, 0.95)
    assert (found.low, found.high) == (low, high)


def test_no_spread_is_a_point() -> None:
    """Equal samples have an interval of no width."""
    found = t_interval([0.5, 0.5, 0.5], 0.995)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_nan_leaves_everything_open() -> None:
    """A process without a figure makes an interval that no comparison holds with."""
    found = t_interval([0.1, math.nan, 0.1], 0.95)
    assert (found.low < 1, found.high < 1) == (False, False)
    assert p_above([0.1, math.nan, 0.1], 0.0) == 1.0


def test_bootstrap_covers_processes_not_blocks() -> None:
    """Its width follows the scatter of processes, however many blocks each has."""
    draw = np.random.default_rng(0)
    rows = [list(mean + draw.normal(0, 1e-4, 50)) for mean in draw.normal(0, 0.01, 12)]
    found = bootstrap_interval(rows, 0.95, seed=1)
    assert 0.005 < found.high - found.low < 0.02
    assert found == bootstrap_interval(rows, 0.95, seed=1)


def test_holm_steps_down() -> None:
    """The smallest p is held to level / n, the next to level / (n - 1), and nothing falls after one that stands."""
    assert any_rejected([0.01, 0.04, 0.03], 0.05) == [True, False, False]
    assert any_rejected([0.01, 0.02, 0.03], 0.05) == [True, True, True]
    assert any_rejected([], 0.05) == []


def test_p_is_of_the_right_side() -> None:
    """Samples well above the limit have a small p, samples below a large one."""
    assert p_above([0.1, 0.11, 0.12], 0.0) < 0.01
    assert p_above([-0.1, -0.11, -0.12], 0.0) > 0.99
    assert [p_above([0.1, 0.1], 0.0), p_above([0.0, 0.0], 0.1)] == [0.0, 1.0]


def test_the_detectable_effect_shrinks_with_processes() -> None:
    """At 0.8 % between processes, 12 of them decide about 1 %, 6 of them about twice that."""
    few, many = (detectable_effect(0.008, count, 0.995) for count in (6, 12))
    assert (0.015 < few < 0.022, 0.008 < many < 0.011) == (True, True)
