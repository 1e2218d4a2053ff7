"""What pytest's process waits for while a job runs: the variant, the stage, since when, and when it is a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pytest_fa.wire.jobs import CaseJob, Job, PairedJob, ProfilerJob


class Awaited(NamedTuple):
    """The variant or process that has reported no progress for `seconds`; after `limit_seconds`, it is ended."""

    name: str
    stage: str
    seconds: float
    limit_seconds: float

    def __str__(self) -> str:
        """For a sentence that begins with `waiting for`."""
        return f"{self.name} ({self.stage}) for {self.seconds:.0f} s"


ShowWait = Callable[[Awaited | None], object]  # None: nothing is awaited any more


def awaited_name(job: Job) -> str:
    """The variant that a job runs; both in paired timing."""
    match job:
        case CaseJob() | ProfilerJob():
            return job.variant.name
        case PairedJob():
            pair = job.arm_pairs[0]
            return f"{pair.candidate.variant.name} and {pair.baseline.variant.name}"
        case _:
            return "the profiler"
