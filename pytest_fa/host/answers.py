"""What the client makes of answers, and of a worker that gives none.

Before it believes an answer, texts are of bounded length, and progress has a time limit.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from pytest_fa.processes import describe_status
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Stage
from pytest_fa.records.text import printable
from pytest_fa.wire.channel import Garbage
from pytest_fa.wire.commands import Ending
from pytest_fa.wire.jobs import CaseJob, CaseResult, Job, Progress, Result
from pytest_fa.wire.stages import most_progress_seconds

MAX_MESSAGE_CHARACTERS = 10_000


class LostWorker(Exception):
    """A worker that ended, was ended, or answered nonsense; `last_progress` is its last progress message."""

    def __init__(self, ending: Ending, message: str, last_progress: Progress) -> None:
        super().__init__(message)
        self.ending, self.message, self.last_progress = ending, message, last_progress


class ChangedArm(LostWorker):
    """Paired timing after which only the processes of other arms had changed; any of the arms may have done it."""


def shortened(answer: Result) -> dict[str, str]:
    """Return the field `message` of a result, cut where it is too long to be shown or saved."""
    message = getattr(answer, "message", "")
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return {}
    return {"message": f"{message[:MAX_MESSAGE_CHARACTERS]} ... ({len(message)} characters in all)"}


def checked_progress(answer: Progress | Result, job: Job) -> Progress:
    """Return a progress message of this job, with a time limit that the job may ask for.  Raises `Garbage`."""
    if not isinstance(answer, Progress) or answer.stage not in job.wanted_stages:
        raise Garbage(f"{type(answer).__name__} for a {type(job).__name__}")
    most_seconds = most_progress_seconds(job.watchdog_seconds)
    return msgspec.structs.replace(answer, seconds=min(max(answer.seconds, 0.0), most_seconds))


def result_without_worker(job: CaseJob, lost: LostWorker) -> CaseResult:
    """The result of a job whose worker was lost.

    It is the result that the worker sent for this event.  Otherwise, the stages before the last one that the worker
    reported were ok.
    """
    if lost.last_progress.result:
        return lost.last_progress.result
    reached = job.wanted_stages.index(lost.last_progress.stage)
    stages = tuple(
        Stage(name, "ok" if index < reached else "failed" if index == reached else "not reached")
        for index, name in enumerate(job.wanted_stages)
    )
    return CaseResult(lost.ending, lost.message, stages, ("watchdog" if lost.ending == Outcome.HUNG else "isolation",))


def ending_text(ending: Outcome, reason: str, last_progress: Progress, statuses: Sequence[int | None]) -> str:
    """A sentence about how a job was lost; `statuses` are those with which the candidates' processes ended."""
    stage = last_progress.stage
    if ending == Outcome.HUNG:
        seconds = f"{last_progress.seconds:g} s"
        message = f"hung: no progress for {seconds} in stage {stage}; the worker process was killed"
    elif ending == Outcome.CRASHED:
        status = next((each for each in statuses if each != signal.SIGKILL), statuses[0] if statuses else None)
        message = f"crashed: {describe_status(status)} in stage {stage}; a new worker process replaces this one"
    else:
        message = f"{reason} in stage {stage}; the worker process was killed"
    return printable(message)
