"""The client that starts a judge and candidates, sends jobs, guards the processes and replaces them.

The pytest process imports no torch and holds no CUDA context.  Jobs go to the judge, which gets the connection to a
candidate's process beside them.  A hang, a trap or a lost CUDA context ends only one candidate and its current job.
Every message has a deadline and a largest size, and an answer that is none ends the process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeVar

import msgspec

from pytest_fa.catalog.own_truth import OwnTruth
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import Interrupted
from pytest_fa.host.answers import (
    ChangedArm,
    LostWorker,
    checked_progress,
    ending_text,
    result_without_worker,
    shortened,
)
from pytest_fa.host.awaited import Awaited, ShowWait, awaited_name
from pytest_fa.host.fork_server import (
    START_SECONDS,
    ForkServer,
    ProcessRole,
    Worker,
    WorkerError,
    live_servers,
)
from pytest_fa.host.job_output import JobOutput, Live, OutputTail
from pytest_fa.host.scheduling import GuardedProcess, unchanged_processes
from pytest_fa.host.stop_signal import Abandoned, StopSignal, is_answered, require_unset
from pytest_fa.processes import memory_bytes, resident_bytes
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.text import is_suspicious, printable_struct
from pytest_fa.wire.channel import Garbage
from pytest_fa.wire.commands import Ending
from pytest_fa.wire.jobs import (
    CaseJob,
    CaseResult,
    Connect,
    ConnectTruth,
    Job,
    PairedJob,
    PairedResult,
    PrepareJudge,
    ProfilerResult,
    Progress,
    decode_answer,
    encode,
    own_truth_of,
    owner_of,
)

__all__ = ["WorkerError", "Workers"]

MAX_JOB_SECONDS = 3600.0  # for a whole job, whatever progress it reports
MAX_LOG_BYTES = 2**28  # the output of one server; a worker that writes more is ended
MAX_MEMORY_SHARE = 0.75  # of this machine's memory, for a candidate
# Of paired timing: the candidate, the baseline, and its A/A twin.
ARMS: tuple[ProcessRole, ...] = ("candidate", "candidate", "candidate")
WHO_CHANGED_IT = "The candidate did it, or that arm itself: a baseline must leave its process as it is"
LET_GO_SECONDS = 2.0  # within which the judge must have ended a job that was abandoned
# The candidates of a job, by its `without_attention`.
ROLES: dict[bool, tuple[ProcessRole, ...]] = {False: ("candidate",), True: ("candidate", "bare")}

AnyResult = TypeVar("AnyResult", CaseResult, PairedResult, ProfilerResult)


class TruthWorker(NamedTuple):
    """The process of the user's functions, the judge that asks it, and the file that it has imported."""

    worker: Worker
    judge: Worker
    key: tuple[str, str]  # path, sha256


class Workers:
    """One server, a judge, and the candidates of the current job.  A process that crashes or hangs is replaced.

    If two processes cannot share memory on this machine, judge and variant share one process; `unprotected` then has
    the reason.  `show_live` gets what a variant prints soon after it was printed, if it is set, and `show_wait` every
    second what a job waits for.  With `gpu_uuid`, the processes see only this GPU.  When `stop` is set, the current job
    raises `Abandoned`.
    """

    show_live: Live | None = None
    show_wait: ShowWait | None = None
    stop: StopSignal | None = None

    def __init__(self, cache: Path | None = None, gpu_uuid: str | None = None) -> None:
        self._cache, self._gpu_uuid = cache, gpu_uuid
        self._server: ForkServer | None = None
        self._judge: Worker | None = None
        self._runs_variants = False  # whether it loads variants itself: an unprotected judge
        self._candidates: list[Worker] = []
        self._owner = ""
        self._truth: TruthWorker | None = None
        self.unprotected = ""
        self._has_judged = False
        self._printed = OutputTail()
        self._awaited: Callable[[], Awaited] = lambda: Awaited("nothing", "", 0.0, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *, on_gpu: bool = False, with_candidate: bool = False) -> None:
        """Start the server without waiting.  A judge then opens the GPU, and a candidate, if they are asked for."""
        if self._server is None:
            self._server = ForkServer(self._cache, self._gpu_uuid)
        if on_gpu:
            self._server.request("judge", encode(PrepareJudge()))
            if with_candidate:
                self._server.request("early")

    def prepare_candidate(self, variant: Variant) -> None:
        """Let a new candidate open the GPU while its variant is built.

        The next job of a variant in the same folder gets it.  Without a judge, nothing is started.  An error is
        ignored: the same one appears when the job needs the process.
        """
        if self._server is None or self._judge is None or self._candidates or self._runs_variants:
            return
        self._owner = owner_of(variant)
        try:
            self._fork_missing(self._server, ("early",))
        except (WorkerError, OSError):
            self.close()

    def start_processes(self, job: CaseJob) -> None:
        """Start the processes of the first job.  With `-n`, they open no GPU yet.  The job meets any error again."""
        if self._judge is None and not self.unprotected:
            self._belong_to(job.variant)
            try:
                self._processes(ROLES[job.without_attention])
            except (WorkerError, OSError):
                self.close()

    def _belong_to(self, variant: Variant) -> None:
        """End the candidates of another variant: state that its code left in them must not affect this one."""
        if self._owner not in ("", owner_of(variant)):
            self.end_worker()
        self._owner = owner_of(variant)

    def run(self, job: CaseJob) -> CaseResult:
        """Run one job and return its result, also if a process crashes or hangs.

        Raises `WorkerError` if no process can be started.
        """
        self._belong_to(job.variant)
        roles = () if self.unprotected else ROLES[job.without_attention]
        try:
            result = self._run_in_worker(job, CaseResult, roles)
        except LostWorker as lost:
            result = result_without_worker(job, lost)
        finally:
            self._end_candidates(1)  # one without torch's attention is for one job
        if not roles:  # judge and variant were one process
            return msgspec.structs.replace(result, unprotected=self.unprotected)
        if result.lacks_sharing and not self._has_judged:  # once a variant has run, it could have caused this
            self.unprotected = result.message
            self.end_worker()
            self._end_judge()
            return self.run(job)
        self._has_judged = True
        return result

    def run_paired(self, job: PairedJob) -> PairedResult:
        """Run one process of paired timing, with new candidates that are ended after it."""
        if self.unprotected:
            return PairedResult(Outcome.INCONCLUSIVE, f"unprotected: {self.unprotected}", ())
        start = time.perf_counter()
        self.end_worker()
        try:
            result = self._run_in_worker(job, PairedResult, ARMS)
        except ChangedArm as changed:
            return PairedResult(Outcome.INCONCLUSIVE, f"{changed.message}. {WHO_CHANGED_IT}", ())
        except LostWorker as lost:
            return PairedResult(lost.ending, lost.message, ())
        finally:
            self.end_worker()
        processes = time.perf_counter() - start - sum(result.seconds.values())
        return msgspec.structs.replace(result, seconds={"processes": max(0.0, processes), **result.seconds})

    @property
    def output(self) -> str:
        """What `take_output` would return now."""
        return self._printed.text

    def take_output(self) -> str:
        """Return what variants printed during the jobs since the last call: at most the last 64 KiB, printable."""
        return self._printed.take()

    def add_output(self, text: str) -> None:
        """Take over what a variant printed elsewhere, in the processes of other `Workers`."""
        self._printed.add(text)

    def end_worker(self) -> None:
        """End the processes that have loaded a variant, and release what they hold on the GPU.

        The next job gets new ones.  A judge stays.
        """
        if self._server is not None:
            self._server.end_requested("early")
        self._end_candidates(0)
        if self._server is not None:
            self._end_truth(self._server)
        if self._runs_variants:
            self._end_judge()

    def _end_candidates(self, kept: int) -> None:
        """End the candidates, except the first `kept`."""
        ended = self._candidates[kept:]
        del self._candidates[kept:]
        if ended and self._server is not None:
            self._server.end(*ended)

    def let_go(self) -> None:
        """Let the server end, which ends its workers at once, with every process that they started; do not wait."""
        for worker in filter(None, (*self._candidates, self._judge)):
            worker.close()
        if self._truth:
            self._truth.worker.close()
        self._candidates, self._judge, self._truth = [], None, None
        if self._server:
            self._server.let_go()

    def close(self) -> None:
        """End the server and its workers, and wait until they have ended."""
        self.let_go()
        if self._server:
            self._server.close()
        self._server = None

    def _end_judge(self) -> None:
        if self._judge is not None and self._server is not None:
            self._server.end(self._judge)
        self._judge = None

    # -- one job ------------------------------------------------------------------------------------------------------

    def _run_in_worker(self, job: Job, kind: type[AnyResult], roles: tuple[ProcessRole, ...]) -> AnyResult:
        """Send the job to the judge and return its result.  Raises `LostWorker` and `WorkerError`."""
        if self._judge is not None and self._judge.channel.wait(0):  # no job is running, so it can only have died
            self._end_judge()
            self.end_worker()
        if any(candidate.has_ended for candidate in self._candidates):
            self.end_worker()
        server, worker = self._processes(roles)
        if roles and (own_truth := own_truth_of(job)):
            self._connect_truth(server, worker, own_truth)
        if server.log_bytes > MAX_LOG_BYTES // 2:
            server.forget_log()
        output, last = JobOutput(server.log, self.show_live), [Progress(job.wanted_stages[0], START_SECONDS)]
        try:
            with unchanged_processes(self._guarded(worker, roles)) as changes, self._ended_if_lost(last):
                worker.channel.send(encode(job))
                result = self._receive(job, kind, server, worker, output, last)
        except Abandoned:
            self.end_worker()  # the judge notices it, and ends the job
            if self._judge is not None and not is_answered(worker.channel, LET_GO_SECONDS):
                self._end_judge()
            raise
        finally:
            output.show_new(is_last=True)
            self._printed.add(output.text())
        result = self._with_ending(result, job)
        if result.context_lost or changes:
            self.end_worker()
        if changes:
            lost = ChangedArm if all(change.process.is_arm for change in changes) else LostWorker
            raise lost(Outcome.FAILED, "; ".join(map(str, changes)), Progress(job.wanted_stages[0], 0.0))
        return result

    def _guarded(self, worker: Worker, roles: tuple[ProcessRole, ...]) -> dict[int, GuardedProcess]:
        """The processes whose scheduling a variant must not change, by process id: all but its own.

        In paired timing, those are also the processes of the other arms.
        """
        guarded = {os.getpid(): GuardedProcess("pytest's process")}
        guarded |= dict.fromkeys(live_servers(), GuardedProcess("the worker server"))
        if roles:
            guarded[worker.pid] = GuardedProcess("the judge")
        if roles == ARMS:
            arm = GuardedProcess("the process of another arm", is_arm=True)
            guarded |= {candidate.pid: arm for candidate in self._candidates[1:]}
        return guarded

    def _with_ending(self, result: AnyResult, job: Job) -> AnyResult:
        """The result of a job whose candidate was lost, with the way in which its process ended."""
        outcome = getattr(result, "outcome", Outcome.OK)
        if outcome not in (Outcome.CRASHED, Outcome.HUNG) or not result.context_lost:
            return result
        stage = next((stage.name for stage in getattr(result, "stages", ()) if stage.state == "failed"), None)
        progress = Progress(stage or job.wanted_stages[0], job.watchdog_seconds)
        during, ending = getattr(result, "during", ""), self._describe_ending(outcome, "", progress)
        return msgspec.structs.replace(result, message=f"{during}: {ending}" if during else ending)

    def _receive(  # what one job needs
        self,
        job: Job,
        kind: type[AnyResult],
        server: ForkServer,
        worker: Worker,
        output: JobOutput,
        last: list[Progress],
    ) -> AnyResult:
        """Receive progress messages until the result; `last` holds the last one.

        Raises `TimeoutError`, and `Interrupted` at Ctrl-C.
        """
        job_deadline = time.monotonic() + MAX_JOB_SECONDS
        try:
            while self._wait(server, worker, output, min(self._begin_wait(job, last[0]), job_deadline)):
                message = worker.channel.receive()
                answer = decode_answer(message)
                answer = printable_struct(answer) if is_suspicious(message) else answer
                if isinstance(answer, kind):
                    return msgspec.structs.replace(answer, **shortened(answer))
                last[0] = checked_progress(answer, job)
        except KeyboardInterrupt:
            raise Interrupted(f"was waiting for {self._awaited()}") from None
        finally:
            if self.show_wait:
                self.show_wait(None)
        raise TimeoutError

    def _begin_wait(self, job: Job, progress: Progress) -> float:
        """Begin to wait for the next message of a job, and return the time at which its process has hung."""
        start, name = time.monotonic(), awaited_name(job)
        self._awaited = lambda: Awaited(name, progress.stage, time.monotonic() - start, progress.seconds)
        return start + progress.seconds

    @contextlib.contextmanager
    def _ended_if_lost(self, last: list[Progress]) -> Iterator[None]:
        """End all processes of a job, and raise `LostWorker`, if one of them ends, is silent or answers nonsense."""
        try:
            yield
        except (EOFError, ConnectionError):
            raise self._lost(Outcome.CRASHED, "", last[0]) from None
        except TimeoutError:
            raise self._lost(Outcome.HUNG, "", last[0]) from None
        except (Garbage, ValueError, RecursionError, msgspec.MsgspecError) as problem:
            text = f"the worker process sent an answer that cannot be read ({problem})"
            raise self._lost(Outcome.FAILED, text, last[0]) from None

    def _wait(self, server: ForkServer, worker: Worker, output: JobOutput, deadline: float) -> bool:
        """Wait for a message.  Returns False at the deadline; raises `EOFError` if the process has ended."""
        stops = () if self.stop is None else (self.stop.fileno(),)
        others = stops if worker.pidfd is None else (worker.pidfd, *stops)
        most_bytes = int(MAX_MEMORY_SHARE * memory_bytes())
        while (left := deadline - time.monotonic()) > 0:
            is_readable = worker.channel.wait(min(left, output.slice_seconds), *others)
            output.show_new()
            if self.show_wait and not is_readable:
                self.show_wait(self._awaited())
            require_unset(self.stop)
            if is_readable:
                if not worker.channel.wait(0):  # only the process has ended; another one may hold its socket
                    raise EOFError
                return True
            if server.log_bytes > MAX_LOG_BYTES:
                raise Garbage(f"it wrote more than {MAX_LOG_BYTES >> 20} MiB of output")
            if any(resident_bytes(candidate.pid) > most_bytes for candidate in self._candidates):
                raise Garbage(f"it took more than {most_bytes / 2**30:.3g} GiB of memory")
        return False

    def _lost(self, ending: Ending, reason: str, last_progress: Progress) -> LostWorker:
        """End all processes of the job and describe how it was lost."""
        if self._candidates and self._judge is not None and self._server is not None:
            self._server.end(self._judge, request="reap" if ending == Outcome.CRASHED else "kill")
        elif self._judge is not None:
            self._candidates.append(self._judge)  # unprotected: variant and judge are one process
        self._judge = None
        return LostWorker(ending, self._describe_ending(ending, reason, last_progress), last_progress)

    def _describe_ending(self, ending: Outcome, reason: str, last_progress: Progress) -> str:
        """End the candidates, and say how the first one that was lost ended."""
        assert self._server is not None  # noqa: S101  # the caller used it
        request: Literal["kill", "reap"] = "reap" if ending == Outcome.CRASHED else "kill"
        statuses = [self._server.end(candidate, request=request) for candidate in self._candidates]
        self._candidates.clear()
        return ending_text(ending, reason, last_progress, statuses)

    def _processes(self, roles: tuple[ProcessRole, ...]) -> tuple[ForkServer, Worker]:
        """The server, and the judge with its candidates.  A server that does not answer is replaced once."""
        self.start()
        assert self._server is not None  # noqa: S101  # set by start()
        try:
            self._fork_missing(self._server, roles)
        except (WorkerError, ConnectionError):
            self.close()
            self.start()
            self._fork_missing(self._server, roles)
        assert self._judge is not None  # noqa: S101  # forked above
        return self._server, self._judge

    def _connect_truth(self, server: ForkServer, judge: Worker, own_truth: OwnTruth) -> None:
        """Let the judge ask a process of these functions, unless it has one."""
        key = (own_truth.path, own_truth.sha256)
        if self._truth and self._truth.judge is judge and self._truth.key == key and not self._truth.worker.has_ended:
            return
        self._end_truth(server)
        worker = server.fork("truth")
        self._truth = TruthWorker(worker, judge, key)
        judge.channel.send(encode(ConnectTruth(worker.pid)), worker.channel.fileno())
        worker.channel.close()  # the judge has it now

    def _end_truth(self, server: ForkServer) -> None:
        if self._truth is not None:
            server.end(self._truth.worker)
        self._truth = None

    def _fork_missing(self, server: ForkServer, roles: tuple[ProcessRole, ...]) -> None:
        """Fork the judge and the candidates that are not there yet, and connect them."""
        if self._judge is None:
            self._end_candidates(0)
            server.end_requested(*(() if roles else ("judge", "early")))
            self._judge, self._runs_variants = server.fork("judge" if roles else "worker"), not roles
        for place in range(len(self._candidates), len(roles)):
            candidate = server.fork(roles[place])
            self._candidates.append(candidate)
            self._judge.channel.send(encode(Connect(candidate.pid, place)), candidate.channel.fileno())
            candidate.channel.close()  # the judge has it now
