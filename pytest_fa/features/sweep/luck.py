"""How much faster the best of N equal configurations looks, by chance alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.integrate import quad
from scipy.special import log_ndtr


def expected_largest(count: int) -> float:
    """Return the expected value of the largest of `count` draws from a standard normal distribution.

    It is the integral over x of x times the density of the maximum, count * phi(x) * Phi(x)^(count - 1) (H. A. David
    and H. N. Nagaraja, Order Statistics, 3rd edition, section 3.1).
    """
    if count < 1:
        raise ValueError(f"{count} draws have no largest one")

    def weighted(x: float) -> float:
        log_density = -x * x / 2 - math.log(2 * math.pi) / 2
        return x * count * math.exp(log_density + (count - 1) * float(log_ndtr(x)))

    return float(quad(weighted, -10, 10, limit=200)[0])


def degrees_of_freedom(groups: Sequence[Sequence[float]]) -> int:
    """Return how many values of the groups say something about the deviation within them."""
    return sum(len(group) - 1 for group in groups if group)


def pooled_sd(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation within the groups; None if no group has two values."""
    used = [group for group in groups if len(group) > 1]
    freedom = degrees_of_freedom(groups)
    if not freedom:
        return None
    return math.sqrt(sum(statistics.variance(group) * (len(group) - 1) for group in used) / freedom)
