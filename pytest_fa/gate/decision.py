"""The verdict: PASS, FAIL or INCONCLUSIVE, from the process means of every pair of a gate.

Two looks, after 6 and after 12 processes, each at 0.5 % two-sided.  A wrong verdict is then as rare as the two together
allow, and a third look would not be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pytest_fa.gate.intervals import PROCESS_SD, Interval, any_rejected, p_above, t_interval
from pytest_fa.records.gated import GateVerdict, PairSamples

ANALYSES = (6, 12)
CONFIDENCE = 0.995
LEAST_NOISE_BAND = 0.005
MOST_DROPPED = 0.2
LEAST_SD_SHARE = 0.5  # of the spread of processes that is known: fewer may not decide by scattering less


class Analysis(msgspec.Struct, frozen=True):
    """What is known after so many processes; `verdict` is None where more processes may decide."""

    verdict: GateVerdict | None
    reason: str
    intervals: tuple[Interval, ...]


def analyse(pairs: Sequence[PairSamples], ratio: float, *, is_last: bool, process_sd: float = PROCESS_SD) -> Analysis:
    """Whether every pair's true ratio is below `ratio`.

    PASS where every upper bound is below it, FAIL where any pair is above it after Holm's rule over the pairs.  A
    machine on which the baseline differs from itself decides nothing, but for a PASS that stands with all of that
    difference added.  `process_sd` is the spread of process means that is known of this machine.
    """
    limit = math.log(ratio)
    least_sd = LEAST_SD_SHARE * process_sd
    intervals = tuple(t_interval(pair.means, CONFIDENCE, least_sd) for pair in pairs)
    undecided: GateVerdict | None = "INCONCLUSIVE" if is_last else None
    if lost := max((sum(not row for row in pair.blocks) for pair in pairs), default=0):
        return Analysis("INCONCLUSIVE", f"the GPU was slowed down in {lost} processes for too many blocks", intervals)
    noise, reach = _noise(pairs, ratio)
    if pairs and all(each.high + reach < limit for each in intervals):
        beside = f", even by {100 * math.expm1(reach):.2f} % more; {noise}" if noise else ""
        return Analysis("PASS", f"every upper bound is below the gate{beside}", intervals)
    if noise:
        return Analysis(undecided, noise, intervals)
    above = any_rejected([p_above(pair.means, limit, least_sd) for pair in pairs], (1 - CONFIDENCE) / 2)
    if any(above):
        slow = [pair.shape_id for pair, is_above in zip(pairs, above, strict=True) if is_above]
        return Analysis("FAIL", f"above the gate: {', '.join(dict.fromkeys(slow))}", intervals)
    open_ = [pair.shape_id for pair, each in zip(pairs, intervals, strict=True) if not each.high < limit]
    return Analysis(undecided, f"the interval holds the gate: {', '.join(dict.fromkeys(open_))}", intervals)


def noise_band(ratio: float) -> float:
    """How far the baseline may seem to differ from itself, as a log-ratio either way."""
    return max(LEAST_NOISE_BAND, abs(1 - ratio) / 4)


def _noise(pairs: Sequence[PairSamples], ratio: float) -> tuple[str, float]:
    """Which baseline differs from itself most, beyond the band or by nobody knows what, and how far; else nothing."""
    band, worst, found = noise_band(ratio), 0.0, ""
    for pair in pairs:
        control = t_interval(pair.control_means, CONFIDENCE)
        reach = max(-control.low, control.high)
        reach = reach if math.isfinite(reach) else math.inf
        if reach > max(band, worst):
            off = f"{100 * math.expm1(control.low):+.2f} to {100 * math.expm1(control.high):+.2f} %"
            worst, found = reach, f"machine too noisy: {pair.baseline} against itself at {pair.shape_id} is {off}"
    return found, worst
