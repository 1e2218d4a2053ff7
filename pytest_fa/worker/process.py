"""The code of the child processes: a server that forks workers, and a worker that runs jobs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

from pytest_fa.processes import (
    END_SECONDS,
    adopt_orphans,
    children_of,
    die_with_parent,
    kill_all,
    outlive_parent,
    zombies_of,
)
from pytest_fa.worker.channel import Channel
from pytest_fa.worker.gate_process import run_gate
from pytest_fa.worker.jobs import GateJob, Job, ProfilerJob, Progress, Result, decode_job, encode
from pytest_fa.worker.pipeline import run_case
from pytest_fa.worker.profiler_process import run_profiler

DYING_SECONDS = 2.0  # a process that dies of a signal closes its connection shortly before it has a wait status


def run(job: Job, report_progress: Callable[[Progress], object] = lambda _: None) -> Result:
    """Run a job of any kind."""
    match job:
        case GateJob():
            return run_gate(job, report_progress)
        case ProfilerJob():
            return run_profiler(job, report_progress)
        case _:
            return run_case(job, report_progress)


def serve(control: socket.socket) -> None:
    """Fork and end workers on request until the socket is closed; then end all of them.  Never opens a device.

    Requests are `fork` with the worker's connection, answered with the process id, and `kill PID` or `reap PID`,
    answered with the wait status.  With a worker, every process that it started is ended, also one that has detached
    itself.
    """
    workers: set[int] = set()
    adopt_orphans()
    outlive_parent()  # from here on, the closed socket tells that the client has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C and closes the socket when it ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if message == b"fork":
            workers.add(_fork_worker(control, descriptors[0]))
        else:
            request, pid_text = message.split()
            workers.discard(int(pid_text))
            status = _end(int(pid_text), DYING_SECONDS if request == b"reap" else 0.0, workers)
            control.send(str(status).encode())
    while workers:
        _end(workers.pop(), 0.0, workers)


def _fork_worker(control: socket.socket, descriptor: int) -> int:
    """Fork a worker that runs the jobs of a connection, send its process id, and return it."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != server:  # it ended before the kernel was told to end this process with it
            os._exit(1)
        control.close()
        os._exit(_worker_status(Channel(socket.socket(fileno=descriptor))))
    os.close(descriptor)
    control.send(str(pid).encode())
    return pid


def work(channel: Channel) -> None:
    """Run jobs until the connection is closed."""
    while True:
        try:
            job = decode_job(channel.receive())
        except EOFError:
            return
        result = run(job, lambda progress: channel.send(encode(progress)))
        flush_output()  # what this job printed must be in the log before the next job begins
        channel.send(encode(result))


def flush_output() -> None:
    """Write what a variant's streams still hold.

    Python and C write to the log at once, because PYTHONUNBUFFERED is set; streams that a variant opened may not.  The
    driver writes the text of device `printf` when the host waits for the device, as each job does before its end.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a variant may have closed or replaced it
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _worker_status(channel: Channel) -> int:
    """Run jobs, and return the exit status of the worker, also if a kernel's code calls `sys.exit` or raises.

    The connection stays open until the process ends.  Thus the client sees it close only when there is a wait status.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        work(channel)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # printed to the log, which is shown with the test
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end(pid: int, limit_seconds: float, others: set[int]) -> int:
    """End a worker and everything it started, and return its wait status.

    A worker that still runs after the limit is killed.  `others` are workers that stay.
    """
    status = _wait_for(pid, limit_seconds)
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = _wait_for(pid, END_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    kill_all(lambda: [child for child in children_of(os.getpid()) if child not in others], DYING_SECONDS)
    _reap_orphans(others)
    return signal.SIGKILL if status is None else status  # a process that the kernel does not end is left to it


def _wait_for(pid: int, limit_seconds: float) -> int | None:
    """Return the wait status of a child, or None if it still runs after the limit."""
    deadline = time.monotonic() + limit_seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def _reap_orphans(workers: set[int]) -> None:
    """Reap the adopted children that have ended; `workers` are reaped by their own request."""
    for pid in zombies_of(os.getpid()):
        if pid not in workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
