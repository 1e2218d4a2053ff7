"""Record types of times: which clock measured them, and whether the clocks agree."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from pytest_fa.records.ranges import Natural, PositiveUs, Real, SignedUs, Us, Whole

ON_CPU = "runs on the CPU"  # the reason for a missing GPU figure

# The dependencies between a call's graph nodes: a chain; parallel branches; or a chain with programmatic dependent
# launch, where a kernel may start before its predecessor ends.
Order = Literal["chain", "branches", "programmatic"]
ORDER_TEXTS = {"chain": "one chain", "branches": "branches", "programmatic": "programmatic launches"}
# For the message that starts a run of calls, its answer, and the judge's copies of outputs.  On an H200, 0.6 to 1.1 ms
# for 90 % of forward calls, and 0.9 to 1.8 ms for backward calls, which have three outputs.
MESSAGE_US = 1200.0
OUTPUT_US = 250.0  # for each output after the first


def message_limit_us(publish_us: float, outputs: int) -> float:
    """What a run may contain besides its calls: messages, the judge's copies of `outputs` of a call, and of inputs."""
    return MESSAGE_US + OUTPUT_US * (outputs - 1) + publish_us


class LaunchedKernel(msgspec.Struct, frozen=True):
    """One kernel of a captured call; `count` nodes launch it with the same geometry."""

    mangled: str
    grid: tuple[Natural, Natural, Natural]
    block: tuple[Natural, Natural, Natural]
    dynamic_smem_bytes: Natural
    count: Natural = 1
    static_smem_bytes: Natural = 0
    cluster: tuple[Natural, Natural, Natural] = (1, 1, 1)


class CallNodes(msgspec.Struct, frozen=True):
    """The nodes of a captured call: its kernels, the number of its memsets and copies by kind, and their order."""

    launches: tuple[LaunchedKernel, ...]
    other_nodes: dict[str, Natural] = {}
    order: Order | None = None

    def has_same(self, other: CallNodes) -> bool:
        """Whether both have the same nodes, however they are listed, and depend on one another in the same way."""
        same_others = (self.other_nodes, self.order) == (other.other_nodes, other.order)
        return same_others and Counter(self.launches) == Counter(other.launches)

    @property
    def text(self) -> str:
        """All nodes in one line: `2 x kernel<...> on 16 x 1 x 1 blocks, 1 x memset`."""
        kernels = [f"{each.count} x {each.mangled} on {_size(each.grid)} blocks" for each in self.launches]
        others = [f"{count} x {kind}" for kind, count in self.other_nodes.items()]
        order = [] if self.order in (None, "chain") else [f"with {ORDER_TEXTS[self.order]}"]
        return ", ".join([*kernels, *others, *order]) or "nothing"


def _size(grid: tuple[int, int, int]) -> str:
    return " x ".join(map(str, grid))


PROFILED_OUTPUTS = "in an output of the profiled calls"  # in the reason for which the profiler has no time
POWER_CAP_BIT = 0x04  # NVML's throttle reason "software power cap"
SM_CLOCK_SHARE = 0.03  # SM clocks that differ by more than this share make times not comparable


class Clocks(msgspec.Struct, frozen=True):
    """NVML's readings of a GPU at one moment."""

    sm_mhz: Natural
    memory_mhz: Natural
    power_watts: Real
    temperature_c: Whole
    throttle_reasons: Natural

    @property
    def is_power_capped(self) -> bool:
        """Whether the power cap lowered the clocks."""
        return bool(self.throttle_reasons & POWER_CAP_BIT)

    def is_near(self, other: Clocks) -> bool:
        """Whether the SM clocks differ by 3 % at most, so that times can be compared."""
        slower, faster = sorted((self.sm_mhz, other.sm_mhz))
        return slower >= (1 - SM_CLOCK_SHARE) * faster


class Timing(msgspec.Struct, frozen=True):
    """The raw samples of one measurement method, in microseconds per call.

    `precision` is the half-width of the mean's 95 % confidence interval, as a fraction of the mean.  `dropped` counts
    samples that were taken while heat or the hardware throttled the GPU; with `is_throttled`, they are more than 20 %.
    On the CPU, `on_core_us` is how long the process ran on a core, and `calibration_us` the time of a fixed product.
    """

    method: str
    samples_us: tuple[Us, ...]
    median_us: PositiveUs
    calls_per_sample: Natural
    precision: Real | None = None
    dropped: Natural = 0
    is_throttled: bool = False
    on_core_us: Us | None = None
    calibration_us: PositiveUs | None = None


class NodeTime(msgspec.Struct, frozen=True):
    """The profiler's mean duration of one kernel, memset or copy, and how often one call launches it."""

    name: str
    mean_us: Us
    count: Natural


class ProfilerTime(msgspec.Struct, frozen=True):
    """The durations of one call's nodes by the profiler's clock, measured in a separate process.

    The profiler's clock and the period's clock do not start and stop at the same instants.  `clock_offset_us` is the
    difference, period minus profiler time, measured on waiting kernels of the same launch geometry.  `clocks` were read
    during the load before long nodes; None for short ones.
    """

    profiler_us: Us
    clock_offset_us: SignedUs
    nodes: tuple[NodeTime, ...]
    missing_count: Natural
    clocks: Clocks | None = None


class Agreement(msgspec.Struct, frozen=True):
    """Whether the other clocks and the kernels' names confirm a time; `valid` is None without a profiler time.

    `least_us` is the shortest of the times that were compared.
    """

    valid: bool | None
    reason: str
    least_us: Us | None = None


class OutsideTime(msgspec.Struct, frozen=True):
    """The time per call by the judge's clock, which stands outside the candidate's process.

    `median_us` is the slope between graphs of two lengths, and `whole_us` the longer of the two runs divided by its
    `calls`, with the message that started it and the copies that ended it.  In the proof sample, each of `proof_calls`
    calls has an output of its own, and takes `proof_us`; to write one such output alone takes `fill_us`.  Without
    graphs there is no slope and no proof sample: `median_us` is then `whole_us`.  With `shares_outputs`, the function
    returned one buffer for calls that should write different ones.

    A run also contains the copies that made its inputs visible.  They take `publish_us`, which was measured between
    buffers of the judge's own; None in records of earlier versions, whose runs began after these copies.  Each call
    has so many `outputs`; None in earlier records, which count as one.
    """

    median_us: SignedUs
    precision: Real | None
    whole_us: Us
    calls: Natural
    proof_us: Us | None
    proof_calls: Natural | None = None
    shares_outputs: bool = False
    fill_us: Us | None = None
    publish_us: Us | None = None
    outputs: Natural | None = None

    @property
    def message_us(self) -> float:
        """What a run may contain besides its calls."""
        return message_limit_us(self.publish_us or 0.0, self.outputs or 1)


class Speed(msgspec.Struct, frozen=True):
    """The times of one variant on one shape.

    `device` is the period of back-to-back calls on the GPU (for CPU variants, the wall-clock time of one call), `call`
    the time per call that a Python caller waits, `cold` one call after L2 was cleared.  `launch_overhead_us` is the
    period of empty kernels with the same grid, block, cluster and shared memory.  `other_nodes` counts memsets and
    copies of a captured call.  `order` describes the dependencies between its nodes; with `programmatic`, kernels
    overlap, and the period is not comparable with that of a chain.  `other_gpu_processes` are other processes on the
    GPU.  Calls write `buffers` outputs in turn; `exceeds_l2` says that the tensors of a call are larger than a quarter
    of L2, whose size is `l2_bytes`.  `outside` has the times by the judge's clock; on the CPU, `device` and `call` are
    by that clock themselves.  `graphs_differ` says which timed graph has other nodes per call than `launches` and
    `other_nodes`; it is empty if all have the same.  `repeated_runs` runs were repeated, because the judge was stopped
    or lost its processor in between.
    """

    device: Timing
    call: Timing
    buffers: Natural
    exceeds_l2: bool
    launches: tuple[LaunchedKernel, ...]
    launches_missing: str | None
    clocks_before: Clocks | None
    clocks_after: Clocks | None
    clocks_during: Clocks | None = None
    cold: Timing | None = None
    cold_missing: str | None = None
    launch_overhead_us: SignedUs | None = None
    order: Order | None = None
    other_nodes: dict[str, Natural] = {}
    profiler: ProfilerTime | None = None
    profiler_missing: str | None = None
    agreement: Agreement | None = None
    other_gpu_processes: tuple[str, ...] = ()
    cpu_threads: Natural | None = None
    outside: OutsideTime | None = None
    l2_bytes: Natural | None = None
    graphs_differ: str = ""
    repeated_runs: Natural = 0

    @property
    def nodes(self) -> CallNodes:
        """The nodes of a captured call."""
        return CallNodes(self.launches, self.other_nodes, self.order)

    @property
    def is_on_cpu(self) -> bool:
        """Whether this is a time on the CPU."""
        return self.cold_missing == ON_CPU

    @property
    def is_power_capped(self) -> bool:
        """Whether the power cap lowered the clocks while the calls were timed, or while the profiler read them."""
        profiler_clocks = self.profiler.clocks if self.profiler else None
        return self.judge_saw_power_cap or bool(profiler_clocks and profiler_clocks.is_power_capped)

    @property
    def judge_saw_power_cap(self) -> bool:
        """Whether a reading of the judge's own shows that the power cap lowered the clocks of the timed calls."""
        return any(each.is_power_capped for each in (self.clocks_during, self.clocks_after) if each)

    @property
    def highest_sm_mhz(self) -> int | None:
        """The highest SM clock that was read around the timed calls; None if none was."""
        read = [each.sm_mhz for each in (self.clocks_before, self.clocks_during, self.clocks_after) if each]
        return max(read, default=None)
