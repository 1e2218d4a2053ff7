"""What the client makes of an answer before it believes it: texts of bounded length, and progress with a time limit."""

from __future__ import annotations

import msgspec

from pytest_fa.candidate.channel import Garbage
from pytest_fa.worker.jobs import Job, Progress, Result
from pytest_fa.worker.stages import most_progress_seconds

MOST_MESSAGE_CHARACTERS = 10_000


def shortened(answer: Result) -> dict[str, str]:
    """Return the field `message` of a result, cut where it is too long to be shown or saved."""
    message = getattr(answer, "message", "")
    if len(message) <= MOST_MESSAGE_CHARACTERS:
        return {}
    return {"message": f"{message[:MOST_MESSAGE_CHARACTERS]} ... ({len(message)} characters in all)"}


def checked_progress(answer: Progress | Result, job: Job) -> Progress:
    """Return a progress message of this job, with a time limit that the job may ask for.  Raises `Garbage`."""
    if not isinstance(answer, Progress) or answer.stage not in job.wanted_stages:
        raise Garbage(f"{type(answer).__name__} for a {type(job).__name__}")
    most_seconds = most_progress_seconds(job.watchdog_seconds)
    return msgspec.structs.replace(answer, seconds=min(max(answer.seconds, 0.0), most_seconds))
