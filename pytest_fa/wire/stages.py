"""The stages of a job with their states, durations and progress messages, and the outcome of an exception."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from pytest_fa.errors import (
    ENTRY,
    ChangedBuild,
    DeviceLost,
    LaunchError,
    NoTruth,
    OverLimit,
    Tampering,
    UnsupportedCase,
    WrongResult,
)
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Stage, StageName
from pytest_fa.wire.compiling import CompilingCalls
from pytest_fa.wire.jobs import CaseResult, Job, Progress


class Limited(Protocol):
    """What `Stages` limits of a candidate, which this module cannot import, because it imports torch."""

    limit_seconds: float
    before_launch: Callable[[], object]
    before_compilation: Callable[[], object]
    compiling: CompilingCalls


ReportProgress = Callable[[Progress], object]

# `caught_by` names the checks that detected a fault.  For these outcomes no check ran, so it has a fixed name.
CAUGHT_BY_OUTCOME: dict[Outcome, tuple[str, ...]] = {
    Outcome.FAILED: ("exception",),
    Outcome.LAUNCH_FAILED: ("launch",),
    Outcome.DEVICE_ERROR: ("device error",),
    Outcome.OVER_LIMIT: ("limits",),
    Outcome.BUILD_CHANGED: ("hash of the build",),
}
CAUGHT_BY_ENDING = {Outcome.HUNG: ("watchdog",), Outcome.CRASHED: ("isolation",), Outcome.FAILED: ("isolation",)}

JUDGE_SECONDS = 5.0  # more than the watchdog's time, within which the judge has told of a launch that hangs
WORK_LIMIT_SECONDS = 300.0  # for a step that is not a launch: starting CUDA, loading, truth in float64


class Stages:
    """The states and durations of a job's stages, and the progress messages to the process that waits for the job."""

    def __init__(self, job: Job, report_progress: ReportProgress) -> None:
        self._stages = {name: Stage(name, "not reached") for name in job.wanted_stages}
        self._current = job.wanted_stages[0]
        self._report_progress = report_progress
        self._watchdog_seconds = job.watchdog_seconds
        self._compiling: list[CompilingCalls] = []

    def limit(self, candidate: Limited) -> None:
        """Apply the job's time limits to a candidate, and count the calls in which it compiles apart from stages."""
        candidate.limit_seconds, candidate.before_launch = self._watchdog_seconds, self.announce_launch
        candidate.before_compilation = self.announce_work
        candidate.compiling.seconds = 0.0
        self._compiling.append(candidate.compiling)

    @property
    def compile_seconds(self) -> float:
        """How long calls took that may have compiled; they are in no stage's seconds."""
        return sum(calls.seconds for calls in self._compiling)

    @contextmanager
    def __call__(self, name: StageName) -> Iterator[None]:
        """Run the stage `name` and time it.  An exception marks the stage as failed and is raised again."""
        start = time.perf_counter() - self.compile_seconds
        self._current = name
        self.announce_work()
        try:
            yield
        except BaseException:
            self._stages[name] = Stage(name, "failed", self._seconds_since(start))
            raise
        self._stages[name] = Stage(name, "ok", self._seconds_since(start))

    def _seconds_since(self, start: float) -> float:
        """The seconds since `start`, from which compilations before it were subtracted, without compilations."""
        return max(0.0, time.perf_counter() - self.compile_seconds - start)

    def announce_launch(self) -> None:
        """Report that a launch follows.  A launch that takes longer than the watchdog allows counts as hung.

        The judge notices that itself; this process's caller waits a little longer than it does.
        """
        self._report_progress(Progress(self._current, self._watchdog_seconds + JUDGE_SECONDS))

    def announce_work(self, *, result_if_crashed: CaseResult | None = None) -> None:
        """Report that a step without a launch follows, which may take longer than the watchdog allows a launch.

        `result_if_crashed` becomes the result of the job if the process ends before it reports again.
        """
        self._report_progress(Progress(self._current, most_progress_seconds(self._watchdog_seconds), result_if_crashed))

    def all(self) -> tuple[Stage, ...]:
        """Every stage of the job, reached or not."""
        return tuple(self._stages.values())


def most_progress_seconds(watchdog_seconds: float) -> float:
    """The longest time between two progress messages; longer than a launch may take, which the judge notices itself."""
    return max(WORK_LIMIT_SECONDS, watchdog_seconds + JUDGE_SECONDS)


def outcome_of(problem: Exception) -> Outcome:
    """The outcome that an exception becomes; `failed` for every type that is not in the table.

    A call that does not fit the function, such as one whose output is a tuple, gave no result that could be wrong.
    """
    if isinstance(problem, WrongResult) and problem.caught_by == (ENTRY,):
        return Outcome.FAILED
    outcomes: dict[type[Exception], Outcome] = {
        ChangedBuild: Outcome.BUILD_CHANGED,
        UnsupportedCase: Outcome.UNSUPPORTED,
        OverLimit: Outcome.OVER_LIMIT,
        LaunchError: Outcome.LAUNCH_FAILED,
        DeviceLost: Outcome.DEVICE_ERROR,
        NoTruth: Outcome.INCONCLUSIVE,
        Tampering: Outcome.CHEAT,  # before WrongResult, which it is as well
        WrongResult: Outcome.WRONG,
    }
    return next((name for kind, name in outcomes.items() if isinstance(problem, kind)), Outcome.FAILED)
