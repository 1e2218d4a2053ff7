"""Record types of paired timing: a candidate and a baseline that are timed beside each other, in several processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pytest_fa.records.ranges import LogRatio, Natural

CPU_METHOD = "wall clock of"  # how the method of samples begins on a CPU

# The parts of one process of paired timing.  `processes` is what remains of its time without the others, which are
# seconds of the judge: mostly the start and the end of the three processes of its arms.
PARTS = {
    "processes": "start and end of processes",
    "files": "hashes of files",
    "open": "contexts and libraries",
    "buffers": "inputs and buffers",
    "capture": "plans and graphs",
    "samples": "timed samples",
    "proof": "proof samples",
    "check": "check of outputs",
}


class ArmOrder(msgspec.Struct, frozen=True):
    """The order of the arms in one process: A is the candidate, B the baseline, C the baseline of the A/A control.

    `setup` is the order in which buffers were allocated and graphs captured, such as `CAB`.  `blocks` has the order of
    the samples of every block, also of a dropped one, such as `BABBCCAACB`; the first sample of a block is not used.
    """

    setup: str
    blocks: tuple[str, ...]


class SamplePlan(msgspec.Struct, frozen=True):
    """How the samples of a pair are taken: the calls of one sample of each arm, and whether these are a CUDA graph."""

    calls: tuple[Natural, ...]
    is_captured: bool


class PairSamples(msgspec.Struct, frozen=True):
    """The samples of one shape and one baseline: log(candidate time / baseline time), one row per process.

    A row has one value per block of paired calls.  `control` holds the same values for the baseline against itself (the
    A/A control), measured in the same processes, with separate buffers and captured graphs.  `orders` has the order of
    the arms in each process; older records have none.  `outside` is the log-ratio of each process by the judge's clock,
    which stands outside the processes of the arms; records that have none were measured with one clock.  `gpus` has the
    salted hash of each process's GPU, if there were several.
    """

    shape_id: str
    baseline: str
    blocks: tuple[tuple[LogRatio, ...], ...]
    control: tuple[tuple[LogRatio, ...], ...]
    orders: tuple[ArmOrder, ...] = ()
    outside: tuple[LogRatio, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def means(self) -> list[float]:
        """The mean log-ratio of each process."""
        return [_mean(row) for row in self.blocks]

    @property
    def control_means(self) -> list[float]:
        """The mean log-ratio of each process for the A/A control."""
        return [_mean(row) for row in self.control]


def _mean(row: Sequence[float]) -> float:
    return sum(row) / len(row) if row else math.nan
