"""The code of the child processes: a server that forks workers, and a worker that runs jobs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

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
    answered with the wait status.
    """
    children: set[int] = set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C and closes the socket when it ends
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if message == b"fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                os._exit(_worker_status(Connection(descriptors[0])))
            children.add(pid)
            os.close(descriptors[0])
            control.send(str(pid).encode())
        else:
            request, pid_text = message.split()
            child = int(pid_text)
            children.discard(child)
            control.send(str(_end(child, DYING_SECONDS if request == b"reap" else 0.0)).encode())
    for child in children:
        _end(child, 0.0)


def work(connection: Connection) -> None:
    """Run jobs until the connection is closed."""
    while True:
        try:
            job = decode_job(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(encode(run(job, lambda progress: connection.send_bytes(encode(progress)))))


def _worker_status(connection: Connection) -> int:
    """Run jobs, and return the exit status of the worker, also if a kernel's code calls `sys.exit` or raises.

    The connection stays open until the process ends.  Thus the client sees it close only when there is a wait status.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        work(connection)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # printed to the log, whose end becomes part of the outcome's message
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end(pid: int, limit_seconds: float) -> int:
    """Wait for a child and return its wait status.  A child that still runs after the limit is killed."""
    deadline = time.monotonic() + limit_seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.01)
