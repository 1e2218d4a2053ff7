"""Record types of Nsight Compute and compute-sanitizer results.  None of them holds a benchmark time."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_fa.records.ranges import Natural, Real, Seconds

# How NVIDIA's programs ended, which says nothing of the kernel.  `ncu_status` has a sentence for each of Nsight's.
NsightStatus = Literal[
    "ok",
    "not-installed",
    "permission",
    "unsupported-runtime",
    "busy",
    "no-connection",
    "no-kernels",
    "bad-metric",
    "no-report",
    "empty",
    "wrong-kernel",
    "launch-failed",
    "timeout",
    "failed",
]
BoundBy = Literal["launch", "latency", "memory", "tensor", "exp", "fma"]
ToolStatus = Literal["clean", "found", "suppressed", "not covered", "not measured", "incomplete"]


class Bottleneck(msgspec.Struct, frozen=True):
    """What limits a kernel's speed, with the counters that decided it; `decided_by` maps metric names to values."""

    bound_by: BoundBy
    sentence: str
    decided_by: dict[str, Real]


class SourceLine(msgspec.Struct, frozen=True):
    """The number of stall samples on one source line; `phase` is empty if only the source can tell it."""

    file: str
    line: Natural
    samples: Natural
    phase: str


class CountedKernel(msgspec.Struct, frozen=True):
    """One kernel of a call; `counters` maps Nsight's metric names to values in its base units (ns, byte, %, cycle).

    `lines` are the source lines with stall samples.  `phases` sums these samples by phase of attention; they estimate
    where warps wait, not how much time passes.
    """

    name: str
    counters: dict[str, Real]
    bottleneck: Bottleneck | None = None
    lines: tuple[SourceLine, ...] = ()
    phases: dict[str, Natural] = {}


class CounterDifference(msgspec.Struct, frozen=True):
    """One counter of the candidate's longest kernel (`ours`) and the baseline's (`theirs`), sorted by `weight`."""

    label: str
    ours: Real
    theirs: Real
    weight: Real


class NsightReport(msgspec.Struct, frozen=True):
    """The counters of one call under Nsight Compute, or the reason why there are none.

    `report`, `table`, `log` and `job` are file paths relative to the run's root.  `dropped` are counters that this GPU
    does not have.  `read_by` says whether the figures are from the report module or from the CSV file.  `baseline` is
    the SDPA backend that was profiled at the same shape.  `differences` compares its longest kernel with the
    candidate's.
    """

    status: NsightStatus
    message: str
    preset: str
    tool: str
    seconds: Seconds
    command: tuple[str, ...]
    kernels: tuple[CountedKernel, ...] = ()
    dropped: tuple[str, ...] = ()
    read_by: str = ""
    report: str | None = None
    table: str | None = None
    log: str | None = None
    job: str | None = None
    baseline: str | None = None
    baseline_missing: str | None = None
    baseline_kernels: tuple[CountedKernel, ...] = ()
    differences: tuple[CounterDifference, ...] = ()
    expect: str = ""

    @property
    def longest(self) -> CountedKernel | None:
        """The kernel with the longest duration."""
        return longest(self.kernels)


class Sanitized(msgspec.Struct, frozen=True):
    """The result of one compute-sanitizer tool on one variant, or the reason why there is none.

    `findings` are the first lines of each distinct report.  `count` is the number of errors and hazards in its summary.
    """

    tool: str
    status: ToolStatus
    message: str
    version: str
    seconds: Seconds
    command: tuple[str, ...]
    count: Natural | None = None
    findings: tuple[str, ...] = ()
    log: str | None = None


DURATION = "gpu__time_duration.sum"


def longest(kernels: tuple[CountedKernel, ...]) -> CountedKernel | None:
    """Return the kernel with the longest duration; the first one if no kernel has a duration."""
    return max(kernels, key=lambda kernel: kernel.counters.get(DURATION, 0.0), default=None)
