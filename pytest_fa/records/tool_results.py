"""What profilers and sanitizers found, as it is recorded.  Nothing here is a benchmark time."""

from __future__ import annotations

from typing import Literal

import msgspec

# Why a profile has no counters; `profile.status` says each in a sentence.
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
    """What bounds a kernel, in a sentence that quotes the counters that decided: metric names to values."""

    bound_by: BoundBy
    sentence: str
    decided_by: dict[str, float]


class SourceLine(msgspec.Struct, frozen=True):
    """How many stall samples fell on one line of source; `phase` where it is known without the source."""

    file: str
    line: int
    samples: int
    phase: str


class CountedKernel(msgspec.Struct, frozen=True):
    """One kernel of a call: Nsight's metric names to values in Nsight's base units (ns, byte, %, cycle).

    `lines` are source lines with the samples of stalled warps that fell on them, `phases` those samples by stage of
    attention: an estimate of where warps wait, not of time.
    """

    name: str
    counters: dict[str, float]
    bottleneck: Bottleneck | None = None
    lines: tuple[SourceLine, ...] = ()
    phases: dict[str, int] = {}


class CounterDifference(msgspec.Struct, frozen=True):
    """One counter of the candidate's longest kernel beside the baseline's; `weight` sorts by what matters."""

    label: str
    ours: float
    theirs: float
    weight: float


class NsightReport(msgspec.Struct, frozen=True):
    """One call under Nsight Compute: what it counted, or why it counted nothing.

    `report`, `table`, `log` and `job` are files, as paths from the run's root.  `dropped` are counters that this chip
    lacks.  `read_by` says whether the report module or the CSV gave the figures.  `baseline` is the SDPA backend profiled
    at the same shape, whose longest kernel `differences` compares with ours.
    """

    status: NsightStatus
    message: str
    preset: str
    tool: str
    seconds: float
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
        """The kernel in which most of the call's time is spent."""
        return longest(self.kernels)


class Sanitized(msgspec.Struct, frozen=True):
    """One variant under one tool of compute-sanitizer: what it found, or why it looked at nothing.

    `findings` are the first lines of each distinct report, `count` all errors and hazards of its summary.
    """

    tool: str
    status: ToolStatus
    message: str
    version: str
    seconds: float
    command: tuple[str, ...]
    count: int | None = None
    findings: tuple[str, ...] = ()
    log: str | None = None


DURATION = "gpu__time_duration.sum"


def longest(kernels: tuple[CountedKernel, ...]) -> CountedKernel | None:
    """The kernel with the largest duration; the first where none has one."""
    return max(kernels, key=lambda each: each.counters.get(DURATION, 0.0), default=None)
