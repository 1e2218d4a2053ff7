"""Record types of a gate: the intervals of each pair, and the verdict."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_fa.records.costs import Costs
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.ranges import Natural, Real, Seconds, Us

OLDER_BUILD = "@key:"  # in the name of a baseline that is another build of the candidate, before its key

GateVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


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
