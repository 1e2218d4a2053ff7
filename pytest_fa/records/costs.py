"""The record type of what the tool itself costs: the seconds of one test's job."""

from __future__ import annotations

import msgspec

from pytest_fa.records.ranges import Seconds


class Costs(msgspec.Struct, frozen=True):
    """The seconds of one test outside and inside its job, by the clock of pytest's process.

    `waited_seconds` were spent waiting for the timing lock.  `job_seconds` is the whole job: its stages, and the start
    of its processes if they did not run yet.  `profiler_seconds` is the profiler's process, with its start.
    """

    waited_seconds: Seconds
    job_seconds: Seconds
    profiler_seconds: Seconds
