"""What the child does: one job, or a server that forks a worker for every request."""

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

DYING_SECONDS = 2.0  # a process that was hit by a signal closes its files before it is gone


def run(job: Job, tell: Callable[[Progress], object] = lambda _: None) -> Result:
    """The job's own flow."""
    match job:
        case GateJob():
            return run_gate(job, tell)
        case ProfilerJob():
            return run_profiler(job, tell)
        case _:
            return run_case(job, tell)


def serve(control: socket.socket) -> None:
    """Fork and reap until the other side closes; then end every child.  Never touches a device."""
    children: set[int] = set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to handle; it closes the socket when it ends
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
            word, number = message.split()
            child = int(number)
            children.discard(child)
            control.send(str(_end(child, DYING_SECONDS if word == b"reap" else 0.0)).encode())
    for child in children:
        _end(child, 0.0)


def work(connection: Connection) -> None:
    """Run jobs until the other side closes."""
    while True:
        try:
            job = decode_job(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(encode(run(job, lambda sign: connection.send_bytes(encode(sign)))))


def _worker_status(connection: Connection) -> int:
    """Work until the end, whatever a kernel's code does, and give the status to leave with.

    The connection stays open until the process is gone, so that the other side finds a status and not a live process.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        work(connection)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # said in the log, whose tail becomes the outcome's message
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end(pid: int, patience_seconds: float) -> int:
    """The wait status of a child; one that still lives after so long is killed."""
    deadline = time.monotonic() + patience_seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.01)
