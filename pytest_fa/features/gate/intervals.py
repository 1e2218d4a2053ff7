"""Confidence intervals over processes.  A sample is the mean log-ratio of one process.

Blocks within one process are not independent samples: on an NVIDIA H200 the process means have a standard deviation of
0.8 %, the blocks within one process only 0.2 to 0.3 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np

PROCESS_SD = 0.008  # standard deviation of process means, if it was not measured on this GPU
RESAMPLES = 10_000
BOOTSTRAP_CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A mean of log-ratios and its confidence limits."""

    mean: float
    low: float
    high: float


def t_interval(samples: Sequence[float], confidence: float, least_sd: float = 0.0) -> Interval:
    """Student's t interval of the mean.  It is unbounded for fewer than two samples, and a point without any spread.

    A standard deviation below `least_sd` is replaced by `least_sd`.  Process means often form two clusters.  Six
    processes that happen to be in the same cluster agree closely and would otherwise decide by chance.
    """
    import numpy as np  # noqa: PLC0415  # the import takes half a second and only a gate needs it
    from scipy import stats  # noqa: PLC0415  # as above

    values = np.asarray(samples, dtype=float)
    mean = float(values.mean()) if len(values) else math.nan
    if len(values) < 2:  # noqa: PLR2004
        return Interval(mean, -math.inf, math.inf)
    error = _error(values, least_sd)
    if error == 0:
        return Interval(mean, mean, mean)
    low, high = stats.t.interval(confidence, len(values) - 1, loc=mean, scale=error)
    return Interval(mean, float(low), float(high))


def bootstrap_interval(blocks: Sequence[Sequence[float]], confidence: float, seed: int) -> Interval:
    """Percentile interval from 10,000 resamples of processes, and of the blocks within each process.

    `blocks` has one row of log-ratios for each process.  With few processes this interval is too narrow, so it is
    shown but never used for the verdict.
    """
    import numpy as np  # noqa: PLC0415  # as above

    draw = np.random.default_rng(seed)
    rows = [np.asarray(row, dtype=float) for row in blocks if len(row)]
    if not rows:
        return Interval(math.nan, -math.inf, math.inf)
    # [RESAMPLES, processes]: pick processes with replacement, then replace each pick by the mean of a resample of
    # that process's blocks.
    picked = draw.integers(len(rows), size=(RESAMPLES, len(rows)))
    means = np.empty(picked.shape)
    for index, row in enumerate(rows):
        mask = picked == index
        means[mask] = row[draw.integers(len(row), size=(int(mask.sum()), len(row)))].mean(axis=1)
    low, high = np.quantile(means.mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(np.mean([row.mean() for row in rows])), float(low), float(high))


def _error(values: np.ndarray, least_sd: float) -> float:
    """The standard error of the mean; NaN if a sample is not finite."""
    import numpy as np  # noqa: PLC0415  # as above

    return max(float(values.std(ddof=1)), least_sd) / math.sqrt(len(values)) if np.isfinite(values).all() else math.nan


def p_above(samples: Sequence[float], limit: float, least_sd: float = 0.0) -> float:
    """The p-value of a one-sided t test against the hypothesis that the true mean is at most `limit`.

    1.0 for fewer than two samples, or if a sample is not finite.
    """
    import numpy as np  # noqa: PLC0415  # as above
    from scipy import stats  # noqa: PLC0415  # as above

    values = np.asarray(samples, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():  # noqa: PLR2004
        return 1.0
    error = _error(values, least_sd)
    if error == 0:
        return 0.0 if values[0] > limit else 1.0
    return float(stats.t.sf((values.mean() - limit) / error, len(values) - 1))


def any_rejected(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects at a family-wise `level`."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if not p_values[index] <= level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def detectable_effect(process_sd: float, processes: int, confidence: float, power: float = 0.8) -> float:
    """The smallest relative difference that a gate of `processes` processes detects with probability `power`."""
    from scipy import stats  # noqa: PLC0415  # as above

    width = stats.t.ppf((1 + confidence) / 2, processes - 1) + stats.t.ppf(power, processes - 1)
    return float(width * process_sd / math.sqrt(processes))
