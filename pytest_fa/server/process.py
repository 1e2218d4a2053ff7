"""The code of the child processes: a server that forks others, a judge, a candidate, and a worker for the profiler.

The judge runs jobs and never loads a variant, except SDPA's backends, with which a wrong output is compared.  A
candidate carries out the judge's commands.  A worker runs a profiler's job and its variant in one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable

import torch

from pytest_fa.build.late_imports import keep_package, refuse_changed_modules
from pytest_fa.candidate.serving import (
    serve_judge,
    serve_judge_on_gpu,
    serve_judge_with_profiler,
    serve_without_attention,
)
from pytest_fa.errors import FaError
from pytest_fa.feature import features
from pytest_fa.gpu.device import give_memory_back, is_alive
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.gaps import count_stops
from pytest_fa.judge.connection import Remote
from pytest_fa.judge.paired_process import ARMS, run_paired
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.profiler_process import prepare, run_profiler
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.judge.warm_up import USUAL_CASE, USUAL_POLICY, warm_up_of
from pytest_fa.processes import (
    END_SECONDS,
    adopt_orphans,
    allow_attaching,
    children_of,
    die_with_parent,
    forbid_attaching,
    kill_all,
    outlive_parent,
    zombies_of,
)
from pytest_fa.wire.channel import Channel
from pytest_fa.wire.jobs import (
    CaseJob,
    Connect,
    ConnectTruth,
    Job,
    PairedJob,
    PrepareJudge,
    PrepareProfiler,
    ProfilerJob,
    Progress,
    Result,
    decode_job,
    decode_request,
    encode,
)

# Of the feature that has the user's functions.  It is imported here, before any kernel runs.
TRUTH_SOURCE = next((each.named(each.truth_source) for each in features() if each.truth_source), None)
TRUTH_PROCESS = next((each.named(each.truth_process) for each in features() if each.truth_process), None)
FIRST_JOB_SECONDS = 0.1  # within which the first job comes if it does not wait for a build
DYING_SECONDS = 2.0  # a process that dies of a signal closes its connection shortly before it has a wait status


def run(job: Job, report_progress: Callable[[Progress], object] = lambda _: None) -> Result:
    """Run a job of any kind."""
    match job:
        case PairedJob():
            return run_paired(job, report_progress)
        case ProfilerJob():
            return run_profiler(job, report_progress)
        case PrepareProfiler():
            return prepare(job, Candidate.in_this_process())
        case _:
            return run_case(job, report_progress)


def serve(control: socket.socket) -> None:
    """Fork and end workers on request until the socket is closed; then end all of them.  Never opens a device.

    Requests are a role of `ROLES` with the process's connection, answered with the process id, and `kill PID...` or
    `reap PID...`, answered with the wait status of the first.  With a process, every process that it started is ended,
    also one that has detached itself.
    """
    workers: set[int] = set()
    adopt_orphans()
    forbid_attaching()  # so that no variant changes the judge before it is forked; the judge inherits it
    keep_package()  # what the judge imports after the first kernel is what was there before it
    outlive_parent()  # from here on, the closed socket tells that the client has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C and closes the socket when it ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if message in ROLES:
            workers.add(_fork_worker(control, descriptors[0], ROLES[message]))
        else:
            request, *pids = message.split()
            ending = [int(pid) for pid in pids]
            workers.difference_update(ending)
            status = _end(ending, DYING_SECONDS if request == b"reap" else 0.0, workers)
            control.send(str(status).encode())
    _end_all(workers)


def _end_all(workers: set[int]) -> None:
    """Kill all workers at once, then wait for each, and end everything that they started."""
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    _wait_for_all(workers, END_SECONDS)
    kill_all(lambda: children_of(os.getpid()), DYING_SECONDS)


def _fork_worker(control: socket.socket, descriptor: int, role: Callable[[Channel], None]) -> int:
    """Fork a process that plays a role on a connection, send its process id, and return it."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != server:  # it ended before the kernel was told to end this process with it
            os._exit(1)
        control.close()
        if role is judge_jobs:
            refuse_changed_modules()
        else:
            _prepare_for_users_code(may_be_debugged=role is not TRUTH_PROCESS)
        os._exit(_exit_status(role, Channel(socket.socket(fileno=descriptor))))
    os.close(descriptor)
    control.send(str(pid).encode())
    return pid


def _prepare_for_users_code(*, may_be_debugged: bool) -> None:
    """Let a variant be debugged and import from the current folder, and give it the log as an open file of its own.

    The judge imports nothing from that folder.  No process may attach to that of the user's functions: a
    candidate would find the truth there.  Flags and position of an open file belong to all processes that share
    it: a variant could make the output of a later one begin far behind the end of the log.
    """
    if may_be_debugged:
        allow_attaching()
    sys.path.insert(0, "")
    log = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def judge_jobs(channel: Channel) -> None:
    """Run jobs with candidates in other processes until the connection is closed, or the CUDA context is lost."""
    count_stops()
    candidates: dict[int, Candidate] = {}
    truths = TruthStore()  # for all variants of the run
    while True:
        try:
            request = decode_request(channel.receive())
        except EOFError:
            return
        match request:
            case Connect():
                _replace(candidates, request, channel.take_descriptor(), truths)
                continue
            case ConnectTruth():
                _connect_truth(truths, request, channel.take_descriptor())
                continue
            case PrepareJudge():
                _prepare(channel, truths)
                continue
        result = _judged(request, lambda progress: channel.send(encode(progress)), candidates, truths)
        give_memory_back()  # before the run takes the next job, or gives up the GPU's lock
        channel.send(encode(result))
        if result.context_lost and not is_alive(torch.device(getattr(request, "device", "cpu"))):
            return  # the next job gets a new judge


def _prepare(channel: Channel, truths: TruthStore) -> None:
    """Open the GPU and load what a judge needs there, unless the next message comes at once."""
    gpu = torch.device("cuda")
    if not channel.wait(FIRST_JOB_SECONDS) and (work := warm_up_of(truths, USUAL_CASE, USUAL_POLICY, gpu)):
        work()


def _judged(
    job: Job, report_progress: Callable[[Progress], object], candidates: dict[int, Candidate], truths: TruthStore
) -> Result:
    match job:
        case PairedJob():
            return run_paired(job, report_progress, [candidates[place] for place in range(ARMS)], truths)
        case CaseJob():
            bare = candidates[1] if job.without_attention else None
            return run_case(job, report_progress, candidates[0], bare, truths)
        case ProfilerJob():
            return run_profiler(job, report_progress, candidates[0], truths)
        case PrepareProfiler():
            return prepare(job, candidates[0])


def _connect_truth(truths: TruthStore, connect: ConnectTruth, descriptor: int | None) -> None:
    """Ask a new process for the truth of the user's functions; the one before it has ended."""
    if descriptor is None or TRUTH_SOURCE is None:
        raise FaError("a process of the user's functions came without its connection")
    truths.source = TRUTH_SOURCE(Channel(socket.socket(fileno=descriptor)), connect.pid)


def _replace(candidates: dict[int, Candidate], connect: Connect, descriptor: int | None, truths: TruthStore) -> None:
    """Put a new candidate in its place; the process of the one before it has ended."""
    if connect.place in candidates:
        candidates.pop(connect.place).abandon()
    if descriptor is None:
        raise FaError("a candidate came without its connection")
    channel = Channel(socket.socket(fileno=descriptor))
    candidates[connect.place] = Candidate(Remote(channel, connect.pid), connect.pid, truths.forget)


def work(channel: Channel) -> None:
    """Run jobs whose variant is in this process, too, until the connection is closed."""
    while True:
        try:
            job = decode_job(channel.receive())
        except EOFError:
            return
        result = run(job, lambda progress: channel.send(encode(progress)))
        flush_output()  # what this job printed must be in the log before the next job begins
        give_memory_back()
        channel.send(encode(result))


ROLES: dict[bytes, Callable[[Channel], None]] = {
    b"judge": judge_jobs,
    b"candidate": serve_judge,
    b"early": serve_judge_on_gpu,
    b"bare": serve_without_attention,
    b"profiled": serve_judge_with_profiler,
    b"worker": work,
    **({b"truth": TRUTH_PROCESS} if TRUTH_PROCESS else {}),
}


def flush_output() -> None:
    """Write what a variant's streams still hold.

    Python and C write to the log at once, because PYTHONUNBUFFERED is set; streams that a variant opened may not.  The
    driver writes the text of device `printf` when the host waits for the device, as each job does before its end.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a variant may have closed or replaced it
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _exit_status(role: Callable[[Channel], None], channel: Channel) -> int:
    """Play a role, and return the exit status of the process, also if a kernel's code calls `sys.exit` or raises.

    The connection stays open until the process ends.  Thus the client sees it close only when there is a wait status.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        role(channel)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # printed to the log, which is shown with the test
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end(pids: list[int], limit_seconds: float, others: set[int]) -> int:
    """End workers and everything they started, and return the wait status of the first.

    A worker that still runs after the limit is killed; all of them before any is waited for, because the driver takes
    long to end a process that has used a GPU.  Each limit is for all of them together.  `others` are workers that stay.
    """
    ended = _wait_for_all(pids, limit_seconds)
    running = [pid for pid in pids if pid not in ended]
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ended |= _wait_for_all(running, END_SECONDS)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    kill_all(lambda: [child for child in children_of(os.getpid()) if child not in others], DYING_SECONDS)
    _reap_orphans(others)
    return ended.get(pids[0], signal.SIGKILL)  # a process that the kernel does not end is left to it


def _wait_for_all(pids: Iterable[int], limit_seconds: float) -> dict[int, int]:
    """The wait status of each child that ends within the limit, which is for all of them together."""
    deadline, running = time.monotonic() + limit_seconds, set(pids)
    ended: dict[int, int] = {}
    while True:
        for pid in tuple(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = status
        running -= ended.keys()
        if not running or time.monotonic() >= deadline:
            return ended
        time.sleep(0.005)


def _reap_orphans(workers: set[int]) -> None:
    """Reap the adopted children that have ended; `workers` are reaped by their own request."""
    for pid in zombies_of(os.getpid()):
        if pid not in workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
