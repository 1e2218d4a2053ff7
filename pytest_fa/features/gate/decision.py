"""The verdict of a gate: PASS, FAIL or INCONCLUSIVE, from the process means of every pair.

There are two analyses: the interim analysis after 6 processes and the final one after 12, on each GPU.  Each has a
two-sided error rate of 0.5 %, so the error rate of the verdict is at most the sum of both.  A third analysis would
increase it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pytest_fa.features.gate.gated import GateVerdict
from pytest_fa.features.gate.gpu_effect import by_gpu, independent_samples, least_sample_sd
from pytest_fa.features.gate.intervals import PROCESS_SD, Interval, any_rejected, p_above, t_interval
from pytest_fa.records.paired import PairSamples

ANALYSES = (6, 12)
CONFIDENCE = 0.995
MIN_NOISE_BAND = 0.005
MAX_DROPPED = 0.2  # a process that lost a larger share of its blocks is not used
# The smallest standard deviation that is trusted, as a share of the known one.  With 0.5, up to 2.4 % of simulated
# gates on two equal kernels end with PASS or FAIL; with 0.75, less than 1 % do, and the power is nearly the same.
# docs/explanation/gate.md has the table.
MIN_SD_SHARE = 0.75
EARLIER_SD_SHARES = (0.5,)  # of gates in older records


class Analysis(msgspec.Struct, frozen=True):
    """The result of one analysis.  `verdict` is None if more processes may decide."""

    verdict: GateVerdict | None
    reason: str
    intervals: tuple[Interval, ...]


def analyse(
    pairs: Sequence[PairSamples],
    ratio: float,
    *,
    is_last: bool,
    process_sd: float = PROCESS_SD,
    least_sd_share: float = MIN_SD_SHARE,
) -> Analysis:
    """Decide whether every pair's true ratio is below `ratio`.

    PASS: the upper confidence limit of every pair is below `ratio`, and so is its ratio by the judge's clock. FAIL:
    at least one pair is above it, by Holm's procedure over the pairs. If the A/A control deviates beyond the noise
    band, there is no FAIL, and PASS requires upper limits that stay below `ratio` with that deviation added.
    `process_sd` is the standard deviation of process means that is known for this machine; no smaller one than
    `least_sd_share` of it is trusted.
    """
    limit = math.log(ratio)
    samples = [independent_samples(pair.means, pair.gpus) for pair in pairs]
    least_sds = [least_sample_sd(least_sd_share * process_sd, pair.gpus) for pair in pairs]
    intervals = tuple(map(_deciding_interval, samples, least_sds))
    undecided: GateVerdict | None = "INCONCLUSIVE" if is_last else None
    if lost := max((sum(not row for row in pair.blocks) for pair in pairs), default=0):
        reason = (
            f"{lost} process{'es' * (lost != 1)} lost more than {100 * MAX_DROPPED:.0f} % of the blocks, "
            f"because heat or the hardware slowed the GPU down"
        )
        return Analysis("INCONCLUSIVE", reason, intervals)
    noise, deviation = _noise(pairs, ratio)
    if pairs and all(interval.high + deviation < limit for interval in intervals):
        if slower := _not_below_outside(pairs, limit):
            return Analysis(undecided, slower, intervals)
        allowance = f", even with {100 * math.expm1(deviation):.2f} % added; {noise}" if noise else ""
        return Analysis("PASS", f"the upper confidence limit of every ratio is below {ratio:g}{allowance}", intervals)
    if noise:
        return Analysis(undecided, noise, intervals)
    p_values = [p_above(each, limit, least_sd) for each, least_sd in zip(samples, least_sds, strict=True)]
    above = any_rejected(p_values, (1 - CONFIDENCE) / 2)
    if any(above):
        slow = [pair.shape_id for pair, is_above in zip(pairs, above, strict=True) if is_above]
        return Analysis("FAIL", f"the ratio is above {ratio:g} at {', '.join(dict.fromkeys(slow))}", intervals)
    undecided_shapes = [pair.shape_id for pair, each in zip(pairs, intervals, strict=True) if not each.high < limit]
    shapes = ", ".join(dict.fromkeys(undecided_shapes))
    return Analysis(undecided, f"the upper confidence limit is not below {ratio:g} at {shapes}", intervals)


def _not_below_outside(pairs: Sequence[PairSamples], limit: float) -> str:
    """What the judge's clock says against a PASS: the pairs whose upper confidence limit by it is not below `limit`."""
    measured = [(pair.shape_id, independent_samples(pair.outside, pair.gpus)) for pair in pairs if pair.outside]
    intervals = [(shape, _deciding_interval(samples)) for shape, samples in measured]
    slow = [f"{math.exp(each.mean):.4f} at {shape}" for shape, each in intervals if not each.high < limit]
    return f"by the judge's clock the ratio is {', '.join(slow)}; a PASS needs both clocks" if slow else ""


def _deciding_interval(samples: Sequence[float], least_sd: float = 0.0) -> Interval:
    return t_interval(samples, CONFIDENCE, least_sd)


def control_of(pair: PairSamples) -> tuple[Interval, float]:
    """The interval of a pair's A/A control, and its largest deviation from 0; infinity if it is not finite.

    On several GPUs, it is that of the GPU whose control deviates most: one noisy GPU is not hidden by the others.
    """
    groups = by_gpu(pair.control_means, pair.gpus).values() if pair.gpus else [pair.control_means]
    controls = [t_interval(group, CONFIDENCE) for group in groups]
    return max(((each, _deviation(each)) for each in controls), key=lambda pair: pair[1])


def _deviation(interval: Interval) -> float:
    largest = max(-interval.low, interval.high)
    return largest if math.isfinite(largest) else math.inf


def noise_band(ratio: float) -> float:
    """The largest deviation of the A/A control from 1 that is accepted, as a log-ratio in either direction."""
    return max(MIN_NOISE_BAND, abs(1 - ratio) / 4)


def _noise(pairs: Sequence[PairSamples], ratio: float) -> tuple[str, float]:
    """The pair whose A/A control deviates most, as a sentence, and its deviation as a log-ratio.

    ("", 0.0) if every control is within the noise band.  A control without a finite interval deviates by infinity.
    """
    band, largest, sentence = noise_band(ratio), 0.0, ""
    for pair in pairs:
        control, deviation = control_of(pair)
        if deviation > max(band, largest):
            largest = deviation
            percent = f"{100 * math.expm1(control.low):+.2f} to {100 * math.expm1(control.high):+.2f} %"
            sentence = (
                f"noisy machine: the A/A control ({pair.baseline} against itself at {pair.shape_id}) deviates by "
                f"{percent}, allowed is {100 * band:.2f} %"
            )
    return sentence, largest
