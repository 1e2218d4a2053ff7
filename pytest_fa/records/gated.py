"""Record types of a gate: the samples of each pair, the intervals and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

GateVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


class PairSamples(msgspec.Struct, frozen=True):
    """The samples of one shape and one baseline: log(candidate time / baseline time), one row per process.

    A row has one value per block of paired calls.  `control` holds the same values for the baseline against itself (the
    A/A control), measured in the same processes, with separate buffers and captured graphs.
    """

    shape_id: str
    baseline: str
    blocks: tuple[tuple[float, ...], ...]
    control: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> list[float]:
        """The mean log-ratio of each process."""
        return [_mean(row) for row in self.blocks]

    @property
    def control_means(self) -> list[float]:
        """The mean log-ratio of each process for the A/A control."""
        return [_mean(row) for row in self.control]


class GatePair(msgspec.Struct, frozen=True):
    """The result of one shape and one baseline: the raw blocks, the ratio candidate / baseline, and its intervals.

    A ratio or interval end that is not finite is None.
    """

    samples: PairSamples
    ratio: float | None
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    method: str = ""


class Gate(msgspec.Struct, frozen=True):
    """The settings and the verdict of one gate.

    `ratio` is the required upper bound of candidate / baseline.  `seed` randomises the order of measurements.
    `dropped_blocks` counts blocks that were measured while the GPU was throttled.  `detectable` is the smallest effect
    (log-ratio) that the gate can detect.  `process_sd` is the largest standard deviation of process means among the
    pairs.  `left_out` names the shapes that were not gated, and why.
    """

    ratio: float
    verdict: GateVerdict
    reason: str
    processes: int
    seed: int
    dropped_blocks: int
    detectable: float
    process_sd: float | None
    seconds: float
    pilot_us: dict[str, dict[str, float]]
    pairs: tuple[GatePair, ...]
    left_out: tuple[str, ...] = ()


def _mean(row: Sequence[float]) -> float:
    return sum(row) / len(row) if row else math.nan
