"""What `--ncu` adds to a record: the counters of Nsight Compute, none of which is a benchmark time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from pytest_fa.records.added import Added, Proposal
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.ranges import Natural, Real, Seconds
from pytest_fa.records.record import Record

# How Nsight Compute ended, which says nothing of the kernel.  `ncu_status` has a sentence for each.
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


class NsightReport(Added, frozen=True):
    """The counters of one call under Nsight Compute, or the reason why there are none.

    `report`, `table`, `log` and `job` are file paths relative to the run's root.  `dropped` are counters that this GPU
    does not have.  `read_by` says whether the figures are from the report module or from the CSV file.  `baseline` is
    the SDPA backend that was profiled at the same shape.  `differences` compares its longest kernel with the
    candidate's.
    """

    feature: ClassVar = "ncu"
    kind: ClassVar = "profile"

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

    @classmethod
    def words(cls, records: Sequence[Record]) -> list[str]:
        """Whether there are profiles, or none because the counters could not be read."""
        outcomes = {record.outcome for record in records if record.kind == cls.kind}
        if not outcomes & {Outcome.OK, Outcome.NOT_MEASURED}:
            return []
        return ["profiled" if Outcome.OK in outcomes else "not profiled"]

    @classmethod
    def last_line(cls, records: Sequence[Record]) -> str:
        """The bottleneck of the first kernel that was profiled."""
        kernels = [report.longest for report in cls.all_of(records) if report.longest]
        return f"bottleneck: {kernels[0].bottleneck.sentence}" if kernels and kernels[0].bottleneck else ""

    @classmethod
    def proposal(cls, records: Sequence[Record], *, is_faster: bool) -> Proposal:
        """A profile, which says why the time is as it is, unless there is one."""
        del is_faster
        is_profiled = any(record.kind == cls.kind for record in records)
        return Proposal() if is_profiled else Proposal("why", ("--ncu",))


DURATION = "gpu__time_duration.sum"


def longest(kernels: tuple[CountedKernel, ...]) -> CountedKernel | None:
    """Return the kernel with the longest duration; the first one if no kernel has a duration."""
    return max(kernels, key=lambda kernel: kernel.counters.get(DURATION, 0.0), default=None)
