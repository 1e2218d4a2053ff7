"""The statistics of a gate over several GPUs: processes are nested in GPUs, and the GPU is a random effect.

Two GPUs of one model do not have the same ratio.  A verdict shall hold for GPUs that were not measured, so a sample is
the mean of one GPU, and not that of one process.  With one GPU, a sample is the mean of one process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pytest_fa.features.gate.gated import GpuRatio
from pytest_fa.features.gate.intervals import detectable_effect
from pytest_fa.records.paired import PairSamples


def independent_samples(means: Sequence[float], gpus: Sequence[str]) -> list[float]:
    """The mean of each GPU in the order of their first processes; without `gpus`, the process means as they are.

    `means` has one log-ratio per process, `gpus` the GPU of each process.
    """
    return [statistics.fmean(group) for group in by_gpu(means, gpus).values()] if gpus else list(means)


def least_sample_sd(least_sd: float, gpus: Sequence[str]) -> float:
    """The least standard deviation of the samples, if that of process means is `least_sd`.

    The mean of a GPU has the noise of one process divided by the square root of the number of its processes, even if
    all GPUs have the same ratio.
    """
    return least_sd / math.sqrt(len(gpus) / len(set(gpus))) if gpus else least_sd


def detectable_on(process_sd: float, processes: int, gpus: int, confidence: float) -> float:
    """The smallest relative difference that `processes` processes on each GPU detect, if the GPUs do not differ."""
    if gpus < 2:  # noqa: PLR2004
        return detectable_effect(process_sd, processes, confidence)
    return detectable_effect(process_sd / math.sqrt(processes), gpus, confidence)


def by_gpu(means: Sequence[float], gpus: Sequence[str]) -> dict[str, list[float]]:
    """The process means of each GPU."""
    groups: dict[str, list[float]] = {}
    for gpu, mean in zip(gpus, means, strict=True):
        groups.setdefault(gpu, []).append(mean)
    return groups


def gpu_ratios(means: Sequence[float], gpus: Sequence[str]) -> tuple[GpuRatio, ...]:
    """The ratio of each GPU; empty without `gpus`.  A ratio that is not finite is None."""
    return (
        tuple(
            GpuRatio(gpu, math.exp(mean) if math.isfinite(mean := statistics.fmean(group)) else None)
            for gpu, group in by_gpu(means, gpus).items()
        )
        if gpus
        else ()
    )


def process_sd(means: Sequence[float], gpus: Sequence[str]) -> float | None:
    """The standard deviation of process means, on several GPUs that within a GPU; None for too few finite ones."""
    groups = list(by_gpu(means, gpus).values()) if gpus else [means]
    finite = [rest for group in groups if len(rest := [mean for mean in group if math.isfinite(mean)]) > 1]
    return math.sqrt(statistics.fmean(map(statistics.variance, finite))) if finite else None


def largest_process_sd(pairs: Sequence[PairSamples]) -> float | None:
    """The largest standard deviation of process means among the pairs of a gate."""
    spreads = [process_sd(pair.means, pair.gpus) for pair in pairs]
    return max((spread for spread in spreads if spread is not None), default=None)


def gpu_sd(means: Sequence[float], gpus: Sequence[str]) -> float | None:
    """The standard deviation of the log-ratio between GPUs, without the noise of the processes; None if unknown.

    It is the variance component of a one-way random-effects model with equally many processes on each GPU: the
    variance of the GPUs' means, less the mean variance within a GPU divided by its number of processes; not below 0.
    """
    groups = list(by_gpu(means, gpus).values()) if gpus else []
    if len(groups) < 2 or min(map(len, groups)) < 2 or not all(map(math.isfinite, means)):  # noqa: PLR2004
        return None
    within = statistics.fmean(statistics.variance(group) for group in groups) / len(groups[0])
    between = statistics.variance(statistics.fmean(group) for group in groups)
    return math.sqrt(max(0.0, between - within))
