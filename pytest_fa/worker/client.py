"""The client that starts, watches and replaces the workers that turn jobs into results.

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

from pytest_fa.build.keys import PACKAGE
from pytest_fa.catalog.discover import BUILTIN_ROOT
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.records.record import Stage
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

START_SECONDS = 120.0


class WorkerError(FaError):
    """The worker server itself does not start or answer."""


Ending = Literal["crashed", "hung"]
Lost = tuple[str, Ending, Progress]


class Workers:
    """The pytest process's side: one server, at most one live worker, replaced when it is lost."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._server: subprocess.Popen[bytes] | None = None
        self._was_asked = False
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
            env=child_environment(self._cache),
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

    def profile(self, job: ProfilerJob) -> ProfilerResult:
        """Have one call profiled.  These workers must time nothing: a profiler slows its process's launches down."""
        answer = self._ask(job)
        if isinstance(answer, ProfilerResult):
            return answer
        assert isinstance(answer, tuple)  # noqa: S101
        return ProfilerResult(None, answer[0])

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

    def rest(self) -> None:
        """End the present worker, and with it what it holds on the GPU; the next job gets a new one."""
        self._forget()

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
            if not self._was_asked:  # it may still be importing torch, and has no children to end
                self._server.kill()
            try:
                self._server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
            self._was_asked = False
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
            self._was_asked = True
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


def child_environment(cache: Path | None = None) -> dict[str, str]:
    """A child's: ours, device numbers in NVML's order, this package importable, and the builds in `cache` found."""
    package_parent = str(PACKAGE.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONPATH": f"{package_parent}{os.pathsep}{path}" if path else package_parent,
        **({"PYTEST_FA_CACHE": str(cache)} if cache else {}),
    }


def _owner(variant: Variant) -> str:
    """Who shares a worker: variants of one folder, and all that are shipped with this package.

    An extension of PyTorch has one of its own: it may register names that its twin registers too.
    """
    if variant.entry.kind == "torch":
        return f"{variant.folder}:{variant.name}"
    return variant.root if Path(variant.root) == BUILTIN_ROOT else variant.folder


def _describe(status: int | None) -> str:
    if status is None:
        return "and its server with it"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"
