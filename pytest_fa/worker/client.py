"""The client that starts worker processes, sends them jobs, watches them and replaces them.

The pytest process imports no torch and holds no CUDA context.  It starts one server
(`python -m pytest_fa.worker --serve`), which imports torch but opens no device.  The server forks a worker on request,
within milliseconds.  A hang, a trap or a lost CUDA context ends only that worker and its current job.
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
    """The worker server does not start or does not answer."""


Ending = Literal["crashed", "hung"]
LostWorker = tuple[str, Ending, Progress]  # message, how the worker ended, its last progress message


class Workers:
    """One worker server and at most one worker at a time.  A worker that crashes or hangs is replaced."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._server: subprocess.Popen[bytes] | None = None
        self._has_forked = False
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
        """Start the server without waiting for it: it imports torch while the caller builds."""
        if self._server is not None:
            return
        self._control, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        self._server = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "pytest_fa.worker", "--serve", str(server_socket.fileno())],
            pass_fds=[server_socket.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=child_environment(self._cache),
        )
        server_socket.close()

    def run(self, job: CaseJob) -> CaseResult:
        """Run one job and return its result, also if the worker crashes or hangs.

        Raises `WorkerError` if no worker can be started.
        """
        answer = self._run_in_worker(job)
        if isinstance(answer, CaseResult):
            return answer
        assert isinstance(answer, tuple)  # noqa: S101  # the only other answer to a CaseJob is a LostWorker
        message, ending, last_progress = answer
        if last_progress.result is not None:
            return last_progress.result
        reached = job.wanted_stages.index(last_progress.stage)
        stages = tuple(
            Stage(name, "ok" if index < reached else "failed" if index == reached else "not reached")
            for index, name in enumerate(job.wanted_stages)
        )
        return CaseResult(ending, message, stages, ("watchdog" if ending == "hung" else "isolation",))

    def run_in_new_worker(self, job: GateJob) -> GateResult:
        """Run one process of a gate in a worker that is started for it and ended after it."""
        self.end_worker()
        answer = self._run_in_worker(job)
        self.end_worker()
        if isinstance(answer, GateResult):
            return answer
        assert isinstance(answer, tuple)  # noqa: S101
        message, ending, _ = answer
        return GateResult(ending, message, ())

    def run_profiler(self, job: ProfilerJob) -> ProfilerResult:
        """Profile one call.  Do not time in the same worker: a profiler slows down later launches of its process."""
        answer = self._run_in_worker(job)
        if isinstance(answer, ProfilerResult):
            return answer
        assert isinstance(answer, tuple)  # noqa: S101
        return ProfilerResult(None, answer[0])

    def _run_in_worker(self, job: Job) -> Result | LostWorker:
        """The result of the job, or how its worker was lost."""
        if self._worker is not None and self._worker[1].poll(0):  # no job is running, so it can only have died
            self._request_end()
        if isinstance(job, CaseJob) and self._owner != (owner := _owner(job.variant)):
            self.end_worker()  # state that one variant's code left in the process must not affect another variant
            self._owner = owner
        _, connection = self._worker or self._fork()
        log_start = self._log_size()
        last_progress = Progress(job.wanted_stages[0], START_SECONDS)
        try:
            connection.send_bytes(encode(job))
            while connection.poll(last_progress.seconds):
                answer = decode_answer(connection.recv_bytes())
                if not isinstance(answer, Progress):
                    if answer.context_lost:
                        self._request_end()
                    return answer
                last_progress = answer
        except (EOFError, ConnectionError):
            return self._lost("crashed", last_progress, log_start)
        return self._lost("hung", last_progress, log_start)

    def end_worker(self) -> None:
        """End the current worker, if any, and release what it holds on the GPU.  The next job gets a new worker."""
        if self._worker is not None:
            self._request_end()

    def close(self) -> None:
        """End the worker and the server."""
        self.end_worker()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            if not self._has_forked:  # it may still be importing torch, and it has no children to end
                self._server.kill()
            try:
                self._server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
            self._has_forked = False
        if self._log is not None:
            self._log.close()
            self._log = None

    def _fork(self) -> tuple[int, Connection]:
        """Start a worker: its process id and connection.  A server that does not answer is replaced once."""
        self.start()
        try:
            self._worker = self._request_fork()
        except WorkerError:
            self.close()
            self.start()
            self._worker = self._request_fork()
        return self._worker

    def _request_fork(self) -> tuple[int, Connection]:
        assert self._control is not None  # noqa: S101  # set by start()
        connection, worker_connection = Pipe()
        try:
            self._control.settimeout(START_SECONDS)
            self._has_forked = True
            socket.send_fds(self._control, [b"fork"], [worker_connection.fileno()])
            answer = self._control.recv(64)
        except OSError as problem:
            raise WorkerError(f"the worker server does not answer: {problem}\n{self._log_tail(0)}") from None
        finally:
            worker_connection.close()
        if not answer:
            raise WorkerError(f"the worker server ended before it started a worker:\n{self._log_tail(0)}")
        return int(answer), connection

    def _request_end(self, request: Literal["kill", "reap"] = "kill") -> int | None:
        """End the current worker and return its wait status; None if the server does not answer.

        `kill` ends the worker at once.  `reap` is for a worker that is already ending: it gets 2 s to do so.
        """
        assert self._worker is not None and self._control is not None  # noqa: S101, PT018  # checked by the callers
        pid, connection = self._worker
        self._worker = None
        connection.close()
        try:
            self._control.send(f"{request} {pid}".encode())
            answer = self._control.recv(64)
        except OSError:
            answer = b""
        return int(answer) if answer else None

    def _lost(self, ending: Ending, last_progress: Progress, log_start: int) -> LostWorker:
        if ending == "hung":
            self._request_end()
            message = (
                f"no progress for {last_progress.seconds:g} s in stage {last_progress.stage}; "
                f"the worker process was killed"
            )
        else:
            status = _describe(self._request_end("reap"))
            message = f"the worker process died in stage {last_progress.stage} ({status}); a new one replaces it"
            tail = self._log_tail(log_start)
            message += f"\nits last output:\n{tail}" if tail else ""
        return message, ending, last_progress

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size if self._log else 0

    def _log_tail(self, start: int) -> str:
        if self._log is None:
            return ""
        size = self._log_size()
        text = os.pread(self._log.fileno(), 4000, max(start, size - 4000))
        return text.decode(errors="replace").strip()


def child_environment(cache: Path | None = None) -> dict[str, str]:
    """The environment of a child process.

    It is this process's environment with CUDA devices numbered as NVML numbers them, with this package on PYTHONPATH,
    and with `cache` as the build cache.
    """
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
