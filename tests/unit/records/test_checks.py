"""What the repeats of a call exclude."""

from __future__ import annotations

import pytest

from pytest_fa.records.checks import Repeats


@pytest.mark.parametrize(
    ("count", "differing", "rate"),
    [(30_000, 0, 1e-4), (100, 0, 0.03), (2, 0, 1.0), (0, 0, None), (100, 1, None)],
)
def test_equal_repeats_exclude_a_rate_of_faults(count: int, differing: int, rate: float | None) -> None:
    """N equal repeats exclude a rate of 3 / N, at most 1; differing ones exclude nothing."""
    assert Repeats(count, differing, 0, None, None).excluded_rate == rate


def test_the_rate_is_that_of_95_percent() -> None:
    """With a fault in the excluded rate of calls, all of N calls are right in less than 5 % of runs."""
    for count in (100, 10_000):
        rate = Repeats(count, 0, 0, None, None).excluded_rate
        assert rate is not None
        assert 0.047 < (1 - rate) ** count < 0.05
