"""The client that starts worker processes, sends them jobs, watches them and replaces them.

The pytest process imports no torch and holds no CUDA context.  A hang, a trap or a lost CUDA context ends only one
worker and its current job.  What a worker says is not trusted: every message has a deadline and a largest size, and
an answer that is none ends the worker.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec

from pytest_fa.catalog.discover import BUILTIN_ROOT
from pytest_fa.catalog.variant import Variant
from pytest_fa.processes import read_scheduling, restore_scheduling
from pytest_fa.records.record import Stage
from pytest_fa.records.text import printable, printable_struct
from pytest_fa.worker.channel import Garbage
from pytest_fa.worker.fork_server import START_SECONDS, ForkServer, Worker, WorkerError, live_servers
from pytest_fa.worker.job_output import JobOutput, Live, OutputTail
from pytest_fa.worker.jobs import (
    CaseJob,
    CaseResult,
    GateJob,
    GateResult,
    Job,
    ProfilerJob,
    ProfilerResult,
    Progress,
    Result,
    decode_answer,
    encode,
)
from pytest_fa.worker.stages import WORK_LIMIT_SECONDS

__all__ = ["WorkerError", "Workers"]

MOST_JOB_SECONDS = 3600.0  # for a whole job, whatever progress it reports
MOST_MESSAGE_CHARACTERS = 10_000
MOST_LOG_BYTES = 2**28  # the output of one server; a worker that writes more is ended
SLICE_SECONDS = 1.0  # the size of the output is looked at this often
LIVE_SLICE_SECONDS = 0.1  # new output is shown this often

Ending = Literal["crashed", "hung", "failed"]
AnyResult = TypeVar("AnyResult", CaseResult, GateResult, ProfilerResult)


class LostWorker(Exception):
    """A worker that ended, was ended, or answered nonsense; `last_progress` is its last progress message."""

    def __init__(self, ending: Ending, message: str, last_progress: Progress) -> None:
        super().__init__(message)
        self.ending, self.message, self.last_progress = ending, message, last_progress


class Workers:
    """One worker server and at most one worker at a time.  A worker that crashes or hangs is replaced.

    `show_live` gets what a worker prints soon after it was printed, if it is set.
    """

    show_live: Live | None = None

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._server: ForkServer | None = None
        self._worker: Worker | None = None
        self._owner = ""
        self._printed = OutputTail()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the server without waiting for it: it imports torch while the caller builds."""
        if self._server is None:
            self._server = ForkServer(self._cache)

    def run(self, job: CaseJob) -> CaseResult:
        """Run one job and return its result, also if the worker crashes or hangs.

        Raises `WorkerError` if no worker can be started.
        """
        if self._owner != (owner := _owner(job.variant)):
            self.end_worker()  # state that one variant's code left in the process must not affect another variant
            self._owner = owner
        try:
            return self._run_in_worker(job, CaseResult)
        except LostWorker as lost:
            return result_without_worker(job, lost)

    def run_in_new_worker(self, job: GateJob) -> GateResult:
        """Run one process of a gate in a worker that is started for it and ended after it."""
        self.end_worker()
        try:
            return self._run_in_worker(job, GateResult)
        except LostWorker as lost:
            return GateResult(lost.ending, lost.message, ())
        finally:
            self.end_worker()

    def run_profiler(self, job: ProfilerJob) -> ProfilerResult:
        """Profile one call.  Do not time in the same worker: a profiler slows down later launches of its process."""
        try:
            return self._run_in_worker(job, ProfilerResult)
        except LostWorker as lost:
            return ProfilerResult(None, lost.message)

    def take_output(self) -> str:
        """Return what workers printed during the jobs since the last call: at most the last 64 KiB, printable."""
        return self._printed.take()

    def end_worker(self) -> None:
        """End the current worker, if any, and release what it holds on the GPU.  The next job gets a new worker."""
        if self._worker is not None and self._server is not None:
            self._server.end(self._worker)
        self._worker = None

    def close(self) -> None:
        """End the worker, the server, and every process that they started."""
        self.end_worker()
        if self._server is not None:
            self._server.close()
            self._server = None

    # -- one job ------------------------------------------------------------------------------------------------------

    def _run_in_worker(self, job: Job, kind: type[AnyResult]) -> AnyResult:
        """Send the job to the worker and return its result.  Raises `LostWorker` and `WorkerError`."""
        if self._worker is not None and self._worker.channel.wait(0):  # no job is running, so it can only have died
            self.end_worker()
        server, worker = self._server_and_worker()
        if server.log_bytes > MOST_LOG_BYTES // 2:
            server.forget_log()
        output = JobOutput(server.log, self.show_live)
        try:
            with _unchanged_parents(os.getpid(), *live_servers()) as changes:
                result = self._exchange(job, kind, server, worker, output)
        finally:
            output.show_new(is_last=True)
            self._printed.add(output.text())
        if result.context_lost or changes:
            self.end_worker()
        if changes:
            raise LostWorker("failed", "; ".join(changes), Progress(job.wanted_stages[0], 0.0))
        return result

    def _exchange(
        self, job: Job, kind: type[AnyResult], server: ForkServer, worker: Worker, output: JobOutput
    ) -> AnyResult:
        """Send the job, and receive progress messages until the result."""
        last_progress = Progress(job.wanted_stages[0], START_SECONDS)
        job_deadline = time.monotonic() + MOST_JOB_SECONDS
        try:
            worker.channel.send(encode(job))
            while self._wait(server, worker, output, min(time.monotonic() + last_progress.seconds, job_deadline)):
                answer = printable_struct(decode_answer(worker.channel.receive()))
                if isinstance(answer, kind):
                    return msgspec.structs.replace(answer, **_shortened(answer))
                last_progress = _checked_progress(answer, job)
        except (EOFError, ConnectionError):
            raise self._lost("crashed", "", last_progress) from None
        except TimeoutError:
            raise self._lost("hung", "", last_progress) from None
        except (Garbage, ValueError, RecursionError, msgspec.MsgspecError) as problem:
            text = f"the worker process sent an answer that cannot be read ({problem})"
            raise self._lost("failed", text, last_progress) from None
        raise self._lost("hung", "", last_progress)

    def _wait(self, server: ForkServer, worker: Worker, output: JobOutput, deadline: float) -> bool:
        """Wait for a message.  Returns False at the deadline; raises `EOFError` if the process has ended."""
        others = () if worker.pidfd is None else (worker.pidfd,)
        slice_seconds = LIVE_SLICE_SECONDS if self.show_live else SLICE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            is_readable = worker.channel.wait(min(left, slice_seconds), *others)
            output.show_new()
            if is_readable:
                if not worker.channel.wait(0):  # only the process has ended; another one may hold its socket
                    raise EOFError
                return True
            if server.log_bytes > MOST_LOG_BYTES:
                raise Garbage(f"it wrote more than {MOST_LOG_BYTES >> 20} MiB of output")
        return False

    def _lost(self, ending: Ending, reason: str, last_progress: Progress) -> LostWorker:
        """End the worker and describe how it was lost."""
        assert self._server is not None and self._worker is not None  # noqa: S101, PT018  # the caller used them
        worker, self._worker = self._worker, None
        stage = last_progress.stage
        status = self._server.end(worker, "reap" if ending == "crashed" else "kill")
        if ending == "hung":
            seconds = f"{last_progress.seconds:g} s"
            message = f"hung: no progress for {seconds} in stage {stage}; the worker process was killed"
        elif ending == "crashed":
            message = f"crashed: {_describe(status)} in stage {stage}; a new worker process replaces this one"
        else:
            message = f"{reason} in stage {stage}; the worker process was killed"
        return LostWorker(ending, printable(message), last_progress)

    def _server_and_worker(self) -> tuple[ForkServer, Worker]:
        """The server and a worker.  A server that does not answer is replaced once."""
        self.start()
        assert self._server is not None  # noqa: S101  # set by start()
        if self._worker is None:
            try:
                self._worker = self._server.fork()
            except WorkerError:
                self.close()
                self.start()
                self._worker = self._server.fork()
        return self._server, self._worker


def _shortened(answer: Result) -> dict[str, str]:
    """Return the field `message` of a result, cut where it is too long to be shown or saved."""
    message = getattr(answer, "message", "")
    if len(message) <= MOST_MESSAGE_CHARACTERS:
        return {}
    return {"message": f"{message[:MOST_MESSAGE_CHARACTERS]} ... ({len(message)} characters in all)"}


def _checked_progress(answer: Progress | Result, job: Job) -> Progress:
    """Return a progress message of this job, with a time limit that the job may ask for.  Raises `Garbage`."""
    if not isinstance(answer, Progress) or answer.stage not in job.wanted_stages:
        raise Garbage(f"{type(answer).__name__} for a {type(job).__name__}")
    most_seconds = max(WORK_LIMIT_SECONDS, job.watchdog_seconds)
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
    return CaseResult(lost.ending, lost.message, stages, ("watchdog" if lost.ending == "hung" else "isolation",))


@contextmanager
def _unchanged_parents(*pids: int) -> Iterator[list[str]]:
    """Restore the CPUs, priority and limits of these processes if a job has changed them, and list the changes."""
    before = {pid: read_scheduling(pid) for pid in pids}
    changes: list[str] = []
    try:
        yield changes
    finally:
        for pid, scheduling in before.items():
            now = read_scheduling(pid)
            if scheduling is not None and now is not None and scheduling != now:
                restore_scheduling(pid, scheduling)
                who = "pytest's process" if pid == os.getpid() else "the worker server"
                changes += [f"while the variant ran, {who} changed: {text}" for text in scheduling.differences(now)]


def _owner(variant: Variant) -> str:
    """The group of variants that share a worker: those of one folder, or all that are shipped with this package.

    Each variant of a PyTorch extension has a separate worker: two of them may register the same operator names.
    """
    if variant.entry.kind == "torch":
        return f"{variant.folder}:{variant.name}"
    return variant.root if Path(variant.root) == BUILTIN_ROOT else variant.folder


def _describe(status: int | None) -> str:
    if status is None:
        return "the worker server died too"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"
