"""The rows of the noise table: how far process means vary, and how many gates on them would have a verdict."""

from __future__ import annotations

import statistics

import msgspec

from pytest_fa.features.gate.decision import ANALYSES, analyse
from pytest_fa.features.gate.gated import GateVerdict
from pytest_fa.features.gate.noise import Noise
from pytest_fa.records.paired import PairSamples


class NoiseRow(msgspec.Struct, frozen=True):
    """One pair: its mean log-ratio, the standard deviations of blocks and of process means, and its simulated gates.

    `groups` is the number of groups of 12 processes, `decided` how many of them would end with PASS or FAIL.
    """

    shape_id: str
    candidate: str
    baseline: str
    ratio_mean: float
    block_sd: float
    process_sd: float
    groups: int
    decided: int


def noise_rows(noise: Noise) -> list[NoiseRow]:
    """One row for each pair, and a second one for each A/A pair, from its `control`.

    Each group of 12 processes is gated at a ratio of 1.  An A/A pair should never have a verdict.
    """
    rows = []
    for pair, name in zip(noise.pairs, noise.candidates, strict=True):
        rows.append(_row(name, pair, noise.process_sd))
        if name == pair.baseline:  # then `control` is a second, equivalent sample
            swapped = msgspec.structs.replace(pair, blocks=pair.control, control=pair.blocks)
            rows.append(_row(name, swapped, noise.process_sd))
    return rows


def _row(candidate: str, pair: PairSamples, process_sd: float) -> NoiseRow:
    size = ANALYSES[-1]
    starts = range(0, len(pair.blocks) - size + 1, size)
    groups = [
        msgspec.structs.replace(
            pair, blocks=pair.blocks[start : start + size], control=pair.control[start : start + size]
        )
        for start in starts
    ]
    return NoiseRow(
        shape_id=pair.shape_id,
        candidate=candidate,
        baseline=pair.baseline,
        ratio_mean=statistics.fmean(pair.means),
        block_sd=statistics.fmean(statistics.stdev(row) for row in pair.blocks),
        process_sd=statistics.stdev(pair.means),
        groups=len(groups),
        decided=sum(verdict_at_one(group, process_sd) != "INCONCLUSIVE" for group in groups),
    )


def verdict_at_one(pair: PairSamples, process_sd: float) -> GateVerdict:
    """The verdict of a gate at a ratio of 1 over the first 12 of these processes."""
    verdict: GateVerdict | None = None
    for count in ANALYSES:
        first = msgspec.structs.replace(pair, blocks=pair.blocks[:count], control=pair.control[:count])
        is_last = count == ANALYSES[-1]
        verdict = verdict or analyse([first], 1.0, is_last=is_last, process_sd=process_sd).verdict
    return verdict or "INCONCLUSIVE"
