"""Intervals over processes.  A sample is one process's mean log-ratio: blocks within a process are not independent.

Figures of noise: on an NVIDIA H200 the means of processes scatter with a standard deviation of 0.8 %, blocks within one
process by 0.2 to 0.3 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np

PROCESS_SD = 0.008  # where no earlier gate tells
RESAMPLES = 10_000


class Interval(msgspec.Struct, frozen=True):
    """A mean of log-ratios and the interval around it."""

    mean: float
    low: float
    high: float


def t_interval(samples: Sequence[float], confidence: float, least_sd: float = 0.0) -> Interval:
    """Student's t interval of the mean; without spread it is a point, of fewer than two samples it is everything.

    `least_sd` is taken where the samples scatter less: six processes that happen to land in one of a machine's two
    groups scatter next to nothing, and would decide by luck.
    """
    import numpy as np  # noqa: PLC0415  # half a second that only a gate pays
    from scipy import stats  # noqa: PLC0415

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
    """Percentile interval from 10,000 resamples of processes, and of blocks within each; shown, never judged by.

    `blocks` has one row of log-ratios for each process.  Over few processes it is too narrow.
    """
    import numpy as np  # noqa: PLC0415

    draw = np.random.default_rng(seed)
    rows = [np.asarray(row, dtype=float) for row in blocks if len(row)]
    if not rows:
        return Interval(math.nan, -math.inf, math.inf)
    # One resampled mean for each pick of a process, [RESAMPLES, processes]: the process, then its blocks.
    picked = draw.integers(len(rows), size=(RESAMPLES, len(rows)))
    means = np.empty(picked.shape)
    for index, row in enumerate(rows):
        here = picked == index
        means[here] = row[draw.integers(len(row), size=(int(here.sum()), len(row)))].mean(axis=1)
    low, high = np.quantile(means.mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(np.mean([row.mean() for row in rows])), float(low), float(high))


def _error(values: np.ndarray, least_sd: float) -> float:
    """The standard error of the mean; NaN with a sample that is."""
    import numpy as np  # noqa: PLC0415

    return max(float(values.std(ddof=1)), least_sd) / math.sqrt(len(values)) if np.isfinite(values).all() else math.nan


def p_above(samples: Sequence[float], limit: float, least_sd: float = 0.0) -> float:
    """How likely means as high as these are where the true mean is at most `limit`; NaN is 1."""
    import numpy as np  # noqa: PLC0415
    from scipy import stats  # noqa: PLC0415

    values = np.asarray(samples, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():  # noqa: PLR2004
        return 1.0
    error = _error(values, least_sd)
    if error == 0:
        return 0.0 if values[0] > limit else 1.0
    return float(stats.t.sf((values.mean() - limit) / error, len(values) - 1))


def any_rejected(p_values: Sequence[float], level: float) -> list[bool]:
    """Which of several hypotheses fall by Holm's step-down rule at a family-wise `level`."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if not p_values[index] <= level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def detectable_effect(process_sd: float, processes: int, confidence: float, power: float = 0.8) -> float:
    """The smallest difference, as a share, that so many processes decide with this power."""
    from scipy import stats  # noqa: PLC0415

    width = stats.t.ppf((1 + confidence) / 2, processes - 1) + stats.t.ppf(power, processes - 1)
    return float(width * process_sd / math.sqrt(processes))
