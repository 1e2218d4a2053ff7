"""Jobs, results, and the client that starts, watches and replaces the workers that turn one into the other.

The pytest process holds no torch and no CUDA context.  It starts one server (`python -m pytest_fa.worker --serve`) that
has imported torch and touched no device; the server forks a worker on request, in milliseconds.  A hang, a trap or a
lost context costs that worker and its one job.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import BUILTIN_ROOT
from pytest_fa.catalog.variant import Device, Tolerance, Variant
from pytest_fa.errors import FaError
from pytest_fa.report.record import Busy, Check, Diagnosis, Outcome, Repeats, Speed, Stage, StageName

START_SECONDS = 120.0
WATCHDOG_SECONDS = 10.0


class CaseJob(msgspec.Struct, frozen=True, tag="case"):
    """One variant on one case, and how far to go: judge it, time it, or both.

    A judged call is repeated `repeats` times; None leaves the number to the time it takes.  With `property_name` the
    variant is held to that property in place of being judged on the case alone.  `witnesses` are judged beside it when
    it is wrong.  `library` is the leaf's shared library for a `cuda` entry.  A launch that has not come back after
    `watchdog_seconds` is a hang.
    """

    variant: Variant
    case: Case
    library: str | None
    device: Device
    policy: Tolerance
    judge: bool
    time: bool
    repeats: int | None = 0
    property_name: str | None = None
    witnesses: tuple[Variant, ...] = ()
    watchdog_seconds: float = WATCHDOG_SECONDS

    @property
    def id(self) -> str:
        """Variant and case, or variant and property: `ws_p2-b1h8s512d64-fp16-seed0`, `ws_p2-streams`."""
        return f"{self.variant.name}-{self.property_name or self.case.id}"

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """The stages that this job is to reach, in their order."""
        if self.property_name:
            return ("launch", "correct")
        judged: tuple[StageName, ...] = ("sanity", "correct") if self.judge else ()
        timed: tuple[StageName, ...] = ("speed",) if self.time else ()
        return ("launch", *judged, *timed)


class Arm(msgspec.Struct, frozen=True):
    """One side of a contest: a variant, and its leaf's library where it is built."""

    variant: Variant
    library: str | None


class Contest(msgspec.Struct, frozen=True):
    """A candidate against a baseline on one shape."""

    case: Case
    candidate: Arm
    baseline: Arm


class GateJob(msgspec.Struct, frozen=True, tag="gate"):
    """One process of a gate: every contest in blocks of ABBA and BAAB, and its baseline against itself.

    `seed` decides which arm is captured and which begins.
    """

    contests: tuple[Contest, ...]
    device: Device
    policy: Tolerance
    seed: int
    watchdog_seconds: float = WATCHDOG_SECONDS

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """All of it is timing."""
        return ("speed",)


class BusyJob(msgspec.Struct, frozen=True, tag="busy"):
    """One variant on one case under the profiler, in a process that times nothing."""

    variant: Variant
    case: Case
    library: str | None
    watchdog_seconds: float = WATCHDOG_SECONDS

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """All of it is timing."""
        return ("speed",)


class BusyResult(msgspec.Struct, frozen=True, tag="busy_result"):
    """What the profiler said, or why it said nothing."""

    busy: Busy | None
    missing: str | None
    context_lost: bool = False


class ContestBlocks(msgspec.Struct, frozen=True):
    """log(candidate / baseline) of every block of one contest, and the same of the baseline against itself.

    `dropped` blocks were taken while the GPU was slowed down, and are not among them.  The medians of both arms'
    samples, in microseconds, decide nothing; `method` says how a sample was taken.
    """

    blocks: tuple[float, ...]
    same: tuple[float, ...]
    dropped: int
    candidate_us: float
    baseline_us: float
    method: str


class GateResult(msgspec.Struct, frozen=True, tag="gate_result"):
    """What one process of a gate measured, in the order of the contests, or why it did not."""

    outcome: Outcome
    message: str
    contests: tuple[ContestBlocks, ...]
    context_lost: bool = False


class CaseResult(msgspec.Struct, frozen=True, tag="result"):
    """What came of a job: the outcome, how far it got, and the figures; no tensor, no live object.

    `caught_by` names the checks that found it wrong.  `context_lost` says that the worker's device context is of no
    more use.
    """

    outcome: Outcome
    message: str
    stages: tuple[Stage, ...]
    caught_by: tuple[str, ...] = ()
    check: Check | None = None
    repeats: Repeats | None = None
    diagnosis: Diagnosis | None = None
    speed: Speed | None = None
    context_lost: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A sign of life: the stage that a job is in, and how many seconds the next sign may take.

    `result` is what the job has come to if nothing more is heard.
    """

    stage: StageName
    seconds: float
    result: CaseResult | None = None


class WorkerError(FaError):
    """The worker server itself does not start or answer."""


Job = CaseJob | GateJob | BusyJob
Result = CaseResult | GateResult | BusyResult


def encode(value: Job | Progress | Result) -> bytes:
    """A job, a sign of life or a result as JSON."""
    return msgspec.json.encode(value)


def decode_job(data: bytes) -> Job:
    """A job from JSON.  Raises `msgspec.ValidationError`."""
    job: Job = msgspec.json.decode(data, type=Job)
    return job


def decode_answer(data: bytes) -> Progress | Result:
    """What a worker sends, from JSON.  Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=Progress | Result)


Ending = Literal["crashed", "hung"]
Lost = tuple[str, Ending, Progress]


class Workers:
    """The pytest process's side: one server, at most one live worker, replaced when it is lost."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._worker: tuple[int, Connection] | None = None
        self._owner = ""
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, *, watches_operators: bool = False) -> None:
        """Start the server and return at once: it imports torch while the caller builds.

        `watches_operators` lets it import too what only Python entries need, a second that its workers then share.
        """
        if self._server is not None:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the server
        more = ["--watch-operators"] if watches_operators else []
        self._server = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "pytest_fa.worker", "--serve", str(theirs.fileno()), *more],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=_server_environment(),
        )
        theirs.close()

    def run(self, job: CaseJob) -> CaseResult:
        """Run one job to its result, whatever becomes of the worker.

        Raises `WorkerError` where no worker can be started at all.
        """
        answer = self._ask(job)
        if isinstance(answer, CaseResult):
            return answer
        assert isinstance(answer, tuple)  # noqa: S101  # a case's job has a case's result
        message, ending, last = answer
        if last.result is not None:
            return last.result
        reached = job.wanted_stages.index(last.stage)
        stages = tuple(
            Stage(name, "ok" if index < reached else "failed" if index == reached else "not reached")
            for index, name in enumerate(job.wanted_stages)
        )
        return CaseResult(ending, message, stages, ("watchdog" if ending == "hung" else "isolation",))

    def run_afresh(self, job: GateJob) -> GateResult:
        """Run one process of a gate in a worker of its own, which ends with it."""
        self._forget()
        answer = self._ask(job)
        self._forget()
        if isinstance(answer, GateResult):
            return answer
        assert isinstance(answer, tuple)  # noqa: S101
        message, ending, _ = answer
        return GateResult(ending, message, ())

    def profile(self, job: BusyJob) -> BusyResult:
        """Have one call profiled.  These workers must time nothing: a profiler slows its process's launches down."""
        answer = self._ask(job)
        if isinstance(answer, BusyResult):
            return answer
        assert isinstance(answer, tuple)  # noqa: S101
        return BusyResult(None, answer[0])

    def _ask(self, job: Job) -> Result | Lost:
        """The worker's result, or how it was lost: the message, the ending, the last sign of life."""
        if self._worker is not None and self._worker[1].poll(0):  # nothing was asked: it has died
            self._retire()
        if isinstance(job, CaseJob) and self._owner != (owner := _owner(job.variant)):
            self._forget()  # what one author's code leaves behind in a process is not held against another's
            self._owner = owner
        _, connection = self._worker or self._fork()
        mark = self._log_size()
        last = Progress(job.wanted_stages[0], START_SECONDS)
        try:
            connection.send_bytes(encode(job))
            while connection.poll(last.seconds):
                answer = decode_answer(connection.recv_bytes())
                if not isinstance(answer, Progress):
                    if answer.context_lost:
                        self._retire()
                    return answer
                last = answer
        except (EOFError, ConnectionError):
            return self._lost("crashed", last, mark)
        return self._lost("hung", last, mark)

    def _forget(self) -> None:
        if self._worker is not None:
            self._retire()

    def close(self) -> None:
        """End the worker and the server."""
        if self._worker is not None:
            self._retire()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _fork(self) -> tuple[int, Connection]:
        """Ask the server for a worker that talks over a fresh pipe; a server that is gone is started once more."""
        self.start()
        try:
            self._worker = self._ask_for_worker()
        except WorkerError:
            self.close()
            self.start()
            self._worker = self._ask_for_worker()
        return self._worker

    def _ask_for_worker(self) -> tuple[int, Connection]:
        assert self._control is not None  # noqa: S101  # start() made it
        ours, theirs = Pipe()
        try:
            self._control.settimeout(START_SECONDS)
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            answer = self._control.recv(64)
        except OSError as problem:
            raise WorkerError(f"the worker server does not answer: {problem}\n{self._log_tail(0)}") from None
        finally:
            theirs.close()
        if not answer:
            raise WorkerError(f"the worker server ended before it gave a worker:\n{self._log_tail(0)}")
        return int(answer), ours

    def _retire(self, word: str = "kill") -> int | None:
        """End the present worker and return its wait status, None if unknown; `reap` lets one that is dying finish."""
        assert self._worker is not None and self._control is not None  # noqa: S101, PT018  # callers hold a worker
        pid, connection = self._worker
        self._worker = None
        connection.close()
        try:
            self._control.send(f"{word} {pid}".encode())
            answer = self._control.recv(64)
        except OSError:
            answer = b""
        return int(answer) if answer else None

    def _lost(self, ending: Ending, last: Progress, mark: int) -> Lost:
        if ending == "hung":
            self._retire()
            message = f"no sign of life for {last.seconds:g} s in stage {last.stage}; its worker was killed"
        else:
            status = _describe(self._retire("reap"))
            message = f"its worker died in stage {last.stage} ({status}); a new one takes over"
            tail = self._log_tail(mark)
            message += f"\nits last words:\n{tail}" if tail else ""
        return message, ending, last

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size if self._log else 0

    def _log_tail(self, start: int) -> str:
        if self._log is None:
            return ""
        size = self._log_size()
        text = os.pread(self._log.fileno(), 4000, max(start, size - 4000))
        return text.decode(errors="replace").strip()


def _server_environment() -> dict[str, str]:
    """Ours, with device numbers in NVML's order and this package importable."""
    package_parent = str(Path(__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONPATH": f"{package_parent}{os.pathsep}{path}" if path else package_parent,
    }


def _owner(variant: Variant) -> str:
    """Who shares a worker: variants of one folder, and all that are shipped with this package."""
    return variant.root if Path(variant.root) == BUILTIN_ROOT else variant.folder


def _describe(status: int | None) -> str:
    if status is None:
        return "and its server with it"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"
