"""Record types of a gate: the samples of each pair, the intervals and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from pytest_fa.records.costs import Costs
from pytest_fa.records.ranges import LogRatio, Natural, Real, Seconds, Us

CPU_METHOD = "wall clock of"  # how the method of samples begins on a CPU
OLDER_BUILD = "@key:"  # in the name of a baseline that is another build of the candidate, before its key

# The parts of one process of a gate.  `processes` is what remains of its time without the others, which are seconds of
# the judge: mostly the start and the end of the three processes of its arms.
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
GateVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]  # of the statistics alone; the gate's record has an outcome


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


class GpuRatio(msgspec.Struct, frozen=True):
    """The ratio candidate / baseline on one of several GPUs, which is named by the salted hash of its UUID."""

    gpu_hash: str
    ratio: Real | None


class GatePair(msgspec.Struct, frozen=True):
    """The result of one shape and one baseline: the raw blocks, the ratio candidate / baseline, and its intervals.

    A ratio or interval end that is not finite is None.  `baseline_us` is the baseline's median time in the gate, on the
    GPU of the pilot; older records have none.  On several GPUs, `gpu_ratios` has the ratio of each, and
    `gpu_sd` the standard deviation of the log-ratio between them, without the noise of the processes.
    """

    samples: PairSamples
    ratio: Real | None
    low: Real | None
    high: Real | None
    bootstrap_low: Real | None
    bootstrap_high: Real | None
    method: str = ""
    baseline_us: Us | None = None
    gpu_ratios: tuple[GpuRatio, ...] = ()
    gpu_sd: Real | None = None


class Gate(msgspec.Struct, frozen=True):
    """The settings and the verdict of one gate.

    `ratio` is the required upper bound of candidate / baseline.  `processes` counts those of all GPUs.  `seed`
    randomises the order of measurements.  `dropped_blocks` counts blocks that were measured while the GPU was
    throttled.  `detectable` is the smallest effect (log-ratio) that the gate can detect.  `process_sd` is the largest
    standard deviation of process means among the pairs, on several GPUs that within a GPU.  `left_out` names the shapes
    that were not gated, and why.  `least_sd_share` is the share of the known standard deviation below which none is
    trusted; records without it used 0.5.  `seconds` contains `pilot_seconds`.  `part_seconds` has the parts of one
    process, on average, by the names of `PARTS`; older records have neither.  `pilot_age_seconds` has the times in
    `pilot_us` that an earlier gate of the run measured: how old they were when they helped to select the baselines.
    `pilot_costs` are the sums over the timings of this gate's own pilot, all of them within `pilot_seconds`.
    """

    ratio: Real
    verdict: GateVerdict
    reason: str
    processes: Natural
    seed: Natural
    dropped_blocks: Natural
    detectable: Real
    process_sd: Real | None
    seconds: Seconds
    pilot_us: dict[str, dict[str, Us]]
    pairs: tuple[GatePair, ...]
    left_out: tuple[str, ...] = ()
    least_sd_share: Real = 0.5
    pilot_seconds: Seconds = 0.0
    part_seconds: dict[str, Seconds] = {}
    pilot_age_seconds: dict[str, dict[str, Seconds]] = {}
    pilot_costs: Costs | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs, on each of which equally many processes ran side by side."""
        return max([1, *(len(set(pair.samples.gpus)) for pair in self.pairs)])


def _mean(row: Sequence[float]) -> float:
    return sum(row) / len(row) if row else math.nan
