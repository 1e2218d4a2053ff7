"""What was timed, by which clock, and whether the clocks agree."""

from __future__ import annotations

from typing import Literal

import msgspec

ON_CPU = "runs on the CPU"  # why a figure of a device is missing

# How a call's nodes hang together: one after the other; side by side; or one beginning before its predecessor ends.
Order = Literal["chain", "branches", "programmatic"]


class LaunchedKernel(msgspec.Struct, frozen=True):
    """One kernel of a captured call, and how many nodes launch it alike."""

    mangled: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int
    count: int = 1
    static_smem_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)


class Clocks(msgspec.Struct, frozen=True):
    """What NVML says of the GPU at one moment."""

    sm_mhz: int
    memory_mhz: int
    power_watts: float
    temperature_c: int
    throttle_reasons: int


class Timing(msgspec.Struct, frozen=True):
    """Raw samples of one way to measure, in microseconds per call.

    `precision` is the half-width of the mean's 95 % interval, as a share of it; `dropped` samples were taken while heat
    or the hardware slowed the GPU down, `is_throttled` says that these were too many for the rest to be trusted.
    """

    method: str
    samples_us: tuple[float, ...]
    median_us: float
    calls_per_sample: int
    precision: float | None = None
    dropped: int = 0
    is_throttled: bool = False


class NodeTime(msgspec.Struct, frozen=True):
    """One kernel, memset or copy of a call, by the profiler: its mean duration and how often a call has it."""

    name: str
    mean_us: float
    count: int


class ProfilerTime(msgspec.Struct, frozen=True):
    """What one call does on the device, by the profiler's clock, in a process of its own.

    `clock_gap_us` is what kernels of the same geometry that only wait take beyond that by the period's clock: the two
    clocks do not begin and end at the same instants.
    """

    profiler_us: float
    clock_gap_us: float
    nodes: tuple[NodeTime, ...]
    missing_count: int


class Agreement(msgspec.Struct, frozen=True):
    """Whether two clocks and the kernels' names confirm a time; None where there is nothing to compare.

    `least_us` is the shorter of what both clocks say, where there are two.
    """

    valid: bool | None
    reason: str
    least_us: float | None = None


class Speed(msgspec.Struct, frozen=True):
    """What one variant costs on one shape.

    `device_us` is the period of back-to-back calls on the device (CPU variants: wall clock of one call), `call_us` what
    a Python caller waits per call, `cold` one call after L2 was cleaned, `launch_overhead_us` the period of empty kernels of the
    same grid, block, cluster and shared memory.  `other_nodes` counts memsets and copies of a captured call, `order`
    says how its nodes hang together: a programmatic one is a period of its own kind.  `other_gpu_processes` are other processes
    that were on the GPU.  `buffers` sets of inputs and outputs take turns; `exceeds_l2` says that one set
    alone is over a quarter of L2.
    """

    device: Timing
    call: Timing
    buffers: int
    exceeds_l2: bool
    launches: tuple[LaunchedKernel, ...]
    launches_missing: str | None
    clocks_before: Clocks | None
    clocks_after: Clocks | None
    clocks_during: Clocks | None = None
    cold: Timing | None = None
    cold_missing: str | None = None
    launch_overhead_us: float | None = None
    order: Order | None = None
    other_nodes: dict[str, int] = {}
    profiler: ProfilerTime | None = None
    profiler_missing: str | None = None
    agreement: Agreement | None = None
    other_gpu_processes: tuple[str, ...] = ()
