"""How far a machine's processes scatter, as rows, and what a gate would have decided about each group of them."""

from __future__ import annotations

import statistics

import msgspec

from pytest_fa.gate.decision import ANALYSES, analyse
from pytest_fa.records.gated import PairSamples
from pytest_fa.records.noise import Noise


class NoiseRow(msgspec.Struct, frozen=True):
    """One pair: its ratio, how far blocks and processes scatter, and how many of its groups would have a verdict."""

    shape_id: str
    candidate: str
    baseline: str
    ratio_mean: float
    block_sd: float
    process_sd: float
    groups: int
    decided: int


def noise_rows(noise: Noise) -> list[NoiseRow]:
    """Every pair, and every backend against itself once more from the `control` of its pair.

    Groups of 12 processes are gated at a ratio of 1; for a backend against itself no verdict is the right one.
    """
    rows = []
    for pair, name in zip(noise.pairs, noise.candidates, strict=True):
        rows.append(_row(name, pair, noise.process_sd))
        if name == pair.baseline:  # its `control` is a second sample of the same question
            turned = msgspec.structs.replace(pair, blocks=pair.control, control=pair.blocks)
            rows.append(_row(name, turned, noise.process_sd))
    return rows


def _row(candidate: str, pair: PairSamples, process_sd: float) -> NoiseRow:
    size = ANALYSES[-1]
    starts = range(0, len(pair.blocks) - size + 1, size)
    groups = [
        msgspec.structs.replace(pair, blocks=pair.blocks[at : at + size], control=pair.control[at : at + size])
        for at in starts
    ]
    return NoiseRow(
        shape_id=pair.shape_id,
        candidate=candidate,
        baseline=pair.baseline,
        ratio_mean=statistics.fmean(pair.means),
        block_sd=statistics.fmean(statistics.stdev(row) for row in pair.blocks),
        process_sd=statistics.stdev(pair.means),
        groups=len(groups),
        decided=sum(_is_decided(each, process_sd) for each in groups),
    )


def _is_decided(pair: PairSamples, process_sd: float) -> bool:
    """Whether a gate at 1 over this group would have ended with PASS or FAIL."""
    for count in ANALYSES:
        so_far = msgspec.structs.replace(pair, blocks=pair.blocks[:count], control=pair.control[:count])
        found = analyse([so_far], 1.0, is_last=count == ANALYSES[-1], process_sd=process_sd)
        if found.verdict in ("PASS", "FAIL"):
            return True
    return False
