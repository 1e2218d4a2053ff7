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
from pytest_fa.catalog.variant import Device, Tolerance, Variant
from pytest_fa.errors import FaError
from pytest_fa.report.record import Check, Outcome, Repeats, Speed, Stage, StageName

START_SECONDS = 120.0
DEFAULT_DEADLINE_SECONDS = 300.0


class CaseJob(msgspec.Struct, frozen=True):
    """One variant on one case, and how far to go: judge it, time it, or both.

    A judged call is repeated `repeats` times; None leaves the number to the time it takes.  `library` is the leaf's
    shared library for a `cuda` entry.  `deadline_seconds` is all that the worker gets.
    """

    variant: Variant
    case: Case
    library: str | None
    device: Device
    policy: Tolerance
    judge: bool
    time: bool
    repeats: int | None = 0
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS

    @property
    def id(self) -> str:
        """Variant and case: `ws_p2-b1h8s512d64-fp16-seed0`."""
        return f"{self.variant.name}-{self.case.id}"

    @property
    def wanted_stages(self) -> tuple[StageName, ...]:
        """The stages that this job is to reach, in their order."""
        judged: tuple[StageName, ...] = ("sanity", "correct") if self.judge else ()
        timed: tuple[StageName, ...] = ("speed",) if self.time else ()
        return ("launch", *judged, *timed)


class CaseResult(msgspec.Struct, frozen=True):
    """What came of a job: the outcome, how far it got, and the figures; no tensor, no live object.

    `context_lost` says that the worker's device context is of no more use.
    """

    outcome: Outcome
    message: str
    stages: tuple[Stage, ...]
    check: Check | None = None
    speed: Speed | None = None
    repeats: Repeats | None = None
    context_lost: bool = False


class WorkerError(FaError):
    """The worker server itself does not start or answer."""


def encode(value: CaseJob | CaseResult) -> bytes:
    """A job or a result as JSON."""
    return msgspec.json.encode(value)


def decode_job(data: bytes) -> CaseJob:
    """A job from JSON.  Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=CaseJob)


def decode_result(data: bytes) -> CaseResult:
    """A result from JSON.  Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=CaseResult)


Ending = Literal["crashed", "hung"]


class Workers:
    """The pytest process's side: one server, at most one live worker, replaced when it is lost."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._worker: tuple[int, Connection] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the server and return at once: it imports torch while the caller builds."""
        if self._server is not None:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the server
        self._server = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "pytest_fa.worker", "--serve", str(theirs.fileno())],
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
        if self._worker is not None and self._worker[1].poll(0):  # nothing was asked: it has died
            self._retire()
        _, connection = self._worker or self._fork()
        mark = self._log_size()
        try:
            connection.send_bytes(encode(job))
            if not connection.poll(job.deadline_seconds):
                return self._lost(job, "hung", mark)
            answer = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return self._lost(job, "crashed", mark)
        result = decode_result(answer)
        if result.context_lost:
            self._retire()
        return result

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
        """Ask the server for a worker that talks over a fresh pipe."""
        self.start()
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
        self._worker = (int(answer), ours)
        return self._worker

    def _retire(self, word: str = "kill") -> int:
        """End the present worker and return its wait status; `reap` lets one that is dying finish."""
        assert self._worker is not None and self._control is not None  # noqa: S101, PT018  # callers hold a worker
        pid, connection = self._worker
        self._worker = None
        connection.close()
        try:
            self._control.send(f"{word} {pid}".encode())
            answer = self._control.recv(64)
        except OSError:
            answer = b""
        return int(answer) if answer else 0

    def _lost(self, job: CaseJob, ending: Ending, mark: int) -> CaseResult:
        if ending == "hung":
            self._retire()
            message = f"{job.id} did not answer within {job.deadline_seconds:g} s; its worker was killed"
        else:
            message = f"the worker of {job.id} died ({_describe(self._retire('reap'))}); a new one takes over"
            tail = self._log_tail(mark)
            message += f"\nits last words:\n{tail}" if tail else ""
        first, *later = job.wanted_stages  # a worker that is gone does not tell how far it came
        stages = (Stage(first, "failed"), *(Stage(name, "not reached") for name in later))
        return CaseResult(ending, message, stages)

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


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"
