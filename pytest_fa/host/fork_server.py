"""The process that forks workers: `python -m pytest_fa.server --serve` imports torch once, and opens no device.

`ForkServer` starts it, asks it for workers, and ends it with everything that its workers started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import IO, Literal

from pytest_fa.build.keys import PACKAGE
from pytest_fa.build.unchanged import changed_package_file
from pytest_fa.errors import FaError
from pytest_fa.host.resident import ForkedServer, fork_from_resident, replace_resident, resident_pid
from pytest_fa.processes import (
    MARK,
    kill_all,
    marked_with,
    wait_for_child,
)
from pytest_fa.records.text import printable
from pytest_fa.wire.channel import Channel, channel_pair

START_SECONDS = 120.0
END_SECONDS = 15.0  # to end workers, or the server itself, which waits up to 14 s for all that it ends together
# early: a candidate that opens the GPU at once; truth: the user's functions; worker: judge and variant in one process
ProcessRole = Literal["judge", "candidate", "early", "bare", "profiled", "truth", "worker"]
_LIVE: set[int] = set()  # the servers of this process
TAIL_BYTES = 4000


class WorkerError(FaError):
    """The worker server does not start or does not answer."""


class Worker:
    """One worker: its process id, a descriptor of that process, and the channel to it."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid, self.channel = pid, channel
        try:
            self.pidfd: int | None = os.pidfd_open(pid)
        except OSError:
            self.pidfd = None  # it has already ended, or the kernel is older than 5.3

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, as far as this can be seen."""
        poll = select.poll()
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        return self.pidfd is None or bool(poll.poll(0))

    def close(self) -> None:
        """Close the channel and the descriptor; the process itself is ended by the server."""
        self.channel.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class ForkServer:
    """The server process, the socket to it, and the file with the output of it and its workers.

    With `gpu_uuid`, its workers see only this GPU.  The resident server sees all GPUs, so it does not fork this one.
    """

    def __init__(self, cache: Path | None = None, gpu_uuid: str | None = None) -> None:
        mark = uuid.uuid4().hex
        self._mark = mark
        self._log = _new_log()
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # so that it can be truncated while a worker writes to it
        self._control, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        self._has_forked = False
        self._requested: dict[ProcessRole, Channel] = {}  # to processes that were requested before anything needs them
        self._unanswered: list[Channel] = []  # in the order in which the server answers
        self._started: dict[Channel, Worker] = {}  # whose answers came before that of another one
        environment = {**child_environment(cache), MARK: mark}
        if gpu_uuid:
            environment["CUDA_VISIBLE_DEVICES"] = gpu_uuid
        control = server_socket.fileno()
        forked = "" if gpu_uuid else fork_from_resident(self._log.fileno(), control, environment)
        self._outdated = environment if forked == "other" else None  # the resident server is replaced after this run
        self._process = (
            forked
            if isinstance(forked, ForkedServer)
            else subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", "pytest_fa.server", "--serve", str(server_socket.fileno())],
                pass_fds=[server_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        )
        server_socket.close()
        _LIVE.add(self._process.pid)
        if path := changed_package_file():
            self.close()
            raise WorkerError(f"{path} has changed since the first worker server of this run; no other one is started")

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def request(self, role: ProcessRole, first_message: bytes = b"") -> None:
        """Request a process before the first one is needed, without waiting for it; `fork` then returns it.

        It gets the message, unless that is empty.  What fails here fails again when the process is needed.
        """
        if role not in self._requested and not self._has_forked:
            with contextlib.suppress(WorkerError, OSError):
                self._requested[role] = channel = self._request(role)
                if first_message:
                    channel.send(first_message)

    def fork(self, role: ProcessRole = "worker") -> Worker:
        """Start a process, or take the one that was requested.  Raises `WorkerError` if the server does not answer.

        An early candidate is a candidate, too.  A requested process that has ended meanwhile is replaced.
        """
        channel = self._requested.pop(role, None)
        if channel is None and role == "candidate":
            channel = self._requested.pop("early", None)
        if channel is not None:
            worker = self._answered(channel)
            if not worker.has_ended:
                return worker
            self.end(worker, request="reap")
        return self._answered(self._request(role))

    def end_requested(self, *roles: ProcessRole) -> None:
        """End the processes with these roles that were requested, and that nothing has needed."""
        channels = [self._requested.pop(role) for role in roles if role in self._requested]
        if channels:
            with contextlib.suppress(WorkerError):
                self.end(*map(self._answered, channels))

    def _request(self, role: ProcessRole) -> Channel:
        """Request a process, and return the channel to it; `_answered` waits for it."""
        channel, worker_end = channel_pair()
        try:
            socket.send_fds(self._control, [role.encode()], [worker_end.fileno()])
        except OSError as problem:
            channel.close()
            raise self._no_answer(problem) from problem
        finally:
            worker_end.close()
        self._unanswered.append(channel)
        return channel

    def _answered(self, channel: Channel) -> Worker:
        """The requested process at the other end of a channel, once the server has answered."""
        try:
            while channel not in self._started:
                self._take_answer()
        except WorkerError:
            channel.close()
            raise
        return self._started.pop(channel)

    def _take_answer(self) -> None:
        """Wait for the next answer, which is that to the oldest request without one."""
        try:
            answer = self._control.recv(64)
        except OSError as problem:
            raise self._no_answer(problem) from problem
        if not answer:
            raise WorkerError(printable(f"the worker server ended before it started a worker:\n{self._log_tail()}"))
        self._has_forked = True
        channel = self._unanswered.pop(0)
        self._started[channel] = Worker(int(answer), channel)

    def _no_answer(self, problem: OSError) -> WorkerError:
        return WorkerError(printable(f"the worker server does not answer: {problem}\n{self._log_tail()}"))

    def end(self, *workers: Worker, request: Literal["kill", "reap"] = "kill") -> int | None:
        """End workers with all that they started; return the first one's wait status, or None without an answer.

        `kill` ends the workers at once.  `reap` is for workers that are already ending: they get 2 s to do so.
        """
        for worker in workers:
            worker.close()
        try:
            while self._unanswered:
                self._take_answer()
            self._control.settimeout(END_SECONDS)
            self._control.send(" ".join([request, *(str(worker.pid) for worker in workers)]).encode())
            answer = self._control.recv(64)
            self._control.settimeout(START_SECONDS)
        except (OSError, WorkerError):
            self._process.kill()  # it does not answer; the kernel ends its workers with it
            answer = b""
        return int(answer) if answer else None

    def let_go(self) -> None:
        """Let the server end its workers, and then itself."""
        for channel in self._requested.values():
            self._started.get(channel, channel).close()
        self._control.close()
        if not self._has_forked:  # it may still be importing torch, and it has no children to end
            self._process.kill()

    def close(self) -> None:
        """End the server, its workers, and every process that they started."""
        self.let_go()
        try:
            self._wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
        kill_all(lambda: marked_with(self._mark))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait()  # a killed process loses its environment before it has ended
        _LIVE.discard(self._process.pid)
        self._log.close()
        if self._outdated:
            replace_resident(self._outdated)

    def _wait(self) -> None:
        """Wait for the end of the server.  Raises `subprocess.TimeoutExpired`."""
        if isinstance(self._process, ForkedServer):
            self._process.wait(END_SECONDS)
        elif self._process.returncode is None:
            wait_for_child(self._process, END_SECONDS)

    @property
    def log(self) -> int:
        """The descriptor of the file with the output."""
        return self._log.fileno()

    @property
    def log_bytes(self) -> int:
        """The size of the output so far."""
        return os.fstat(self._log.fileno()).st_size

    def forget_log(self) -> None:
        """Delete the output so far."""
        os.ftruncate(self._log.fileno(), 0)

    def _log_tail(self) -> str:
        """The last part of the output."""
        text = os.pread(self._log.fileno(), TAIL_BYTES, max(0, self.log_bytes - TAIL_BYTES))
        return text.decode(errors="replace").strip()


def _new_log() -> IO[bytes]:
    """A file for the output of workers.  Raises `WorkerError` if no folder for temporary files can be used."""
    try:
        return tempfile.TemporaryFile()
    except OSError as problem:
        raise WorkerError(f"no file for the output of kernels can be made: {problem}") from problem


def live_servers() -> tuple[int, ...]:
    """The process ids of all worker servers of this process."""
    return tuple(sorted(_LIVE))


def servers_of_run() -> tuple[int, ...]:
    """The servers from which the processes of this run are forked.

    In a worker of pytest-xdist, the resident server is one of them: it forks the servers of the other workers, too.
    """
    resident = resident_pid() if "PYTEST_XDIST_WORKER" in os.environ else None
    return live_servers() if resident is None else (*live_servers(), resident)


def child_environment(cache: Path | None = None) -> dict[str, str]:
    """The environment of a child process.

    It is this process's environment with CUDA devices numbered as NVML numbers them, with this package on PYTHONPATH,
    and with `cache` as the build cache.  Idle threads of OpenMP do not spin unless the user wants it, because judge and
    candidate take turns on the same cores.
    """
    package_parent = str(PACKAGE.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONPATH": f"{package_parent}{os.pathsep}{path}" if path else package_parent,
        **({"PYTEST_FA_CACHE": str(cache)} if cache else {}),
    }
