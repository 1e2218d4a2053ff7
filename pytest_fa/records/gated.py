"""What a gate asked and answered: samples of every pair, intervals, the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

GateVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


class PairSamples(msgspec.Struct, frozen=True):
    """One shape against one baseline: log(candidate / baseline), block by block, a row for each process.

    `control` holds the baseline against itself, in the same processes, with buffers and captures of its own.
    """

    shape_id: str
    baseline: str
    blocks: tuple[tuple[float, ...], ...]
    control: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> list[float]:
        """The samples: one mean for each process."""
        return [_mean(row) for row in self.blocks]

    @property
    def control_means(self) -> list[float]:
        """The same of the baseline against itself."""
        return [_mean(row) for row in self.control]


class GatePair(msgspec.Struct, frozen=True):
    """One shape against one baseline: the raw blocks, and the ratio candidate / baseline with its intervals.

    An end that is not finite is None.
    """

    samples: PairSamples
    ratio: float | None
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    method: str = ""


class Gate(msgspec.Struct, frozen=True):
    """What a gate asked and found.

    `ratio` is the gate, `seed` draws orders, `dropped_blocks` were taken while the GPU was slowed down, `process_sd` is
    the largest standard deviation of process means among the pairs; `left_out` names what was not gated, and why.
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
