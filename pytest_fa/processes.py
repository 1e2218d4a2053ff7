"""Linux processes: end them with everything that they started.

A worker runs a stranger's code, which may fork or detach itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
MARK = "PYTEST_FA_MARK"  # the environment variable by which processes of one run are recognised
_MAX_STAT_BYTES = 4096  # of one line of 52 numbers
END_SECONDS = 10.0  # within which a killed process has ended, unless the kernel keeps it

# Arguments: the parent's process id, the signal, and the command.
_BECOME = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[2]), 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[3], sys.argv[3:])"
)


@functools.cache
def _prctl() -> Callable[..., int]:
    function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    return function


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    _prctl()(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def dying_with_parent(command: list[str], ending: signal.Signals) -> list[str]:
    """Return a command that runs `command` and that the kernel sends `ending` when this process ends.

    A short Python program asks the kernel and then becomes the command.  `preexec_fn` would do without it, but must not
    be used in a process with threads, such as one of pytest-xdist.
    """
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(int(ending)), *command]


def forbid_attaching() -> None:
    """Keep other processes of this user from reading this one's memory or attaching to it.  Root still can."""
    _prctl()(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def allow_attaching() -> None:
    """Undo `forbid_attaching`, so that a variant can be debugged."""
    _prctl()(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl()(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def resident_bytes(pid: int) -> int:
    """The memory that a process uses; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe_status(status: int | None) -> str:
    """Say how a worker ended, from its wait status; None if its server could not tell."""
    if status is None:
        return "the worker server died too"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none of them can get away."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(parent: int) -> list[int]:
    """Return the process ids of the children of a process that have not ended."""
    return [pid for pid, state in _states_of_children(parent) if state not in "ZX"]


def descendants_of(ancestor: int) -> list[int]:
    """Return the process ids of all processes that a process has started, directly or not, and that have not ended."""
    descendants, parents = [], [ancestor]
    while parents:
        children = children_of(parents.pop())
        descendants += children
        parents += children
    return descendants


def forks_of(pid: int) -> list[int]:
    """Return the descendants of a process that are still the same program.

    A process that becomes another program, or starts one, gets new addresses, which its auxiliary vector contains.
    """
    vector = _auxiliary_vector(pid)
    return [each for each in descendants_of(pid) if vector and _auxiliary_vector(each) == vector]


def _auxiliary_vector(pid: int) -> bytes:
    """The auxiliary vector of a process (proc_pid_auxv(5)); empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/auxv").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def stopped(find: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Stop the processes that `find` returns, also those that it returns only when it is asked again."""
    pids: set[int] = set()
    try:
        while new := set(find()) - pids:
            pids |= new
            for pid in new:
                _send(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            _send(pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def zombies_of(parent: int) -> list[int]:
    """Return the process ids of the children of a process that have ended and were not waited for."""
    return [pid for pid, state in _states_of_children(parent) if state == "Z"]


def _states_of_children(parent: int) -> Iterator[tuple[int, str]]:
    for pid in _all_pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent_of_pid = _stat_of(pid)
            if int(parent_of_pid) == parent:
                yield pid, state


def ancestors_of(pid: int) -> Iterator[int]:
    """Yield a process and its ancestors, up to process 1 or to one that has ended."""
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            yield pid
            pid = int(_stat_of(pid)[1])


def name_of(pid: int) -> str:
    """The name of a process, which may contain anything.  Raises `OSError` if it cannot be seen."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")


def _stat_of(pid: int) -> tuple[str, str]:
    """Return the state and the parent of a process.  Its name, in parentheses, may contain anything."""
    # This is read for every process of the machine, and takes half of the time of `Path.read_bytes`.
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, _MAX_STAT_BYTES)
    finally:
        os.close(descriptor)
    state, parent, *_ = text.rpartition(b")")[2].decode().split(maxsplit=2)
    return state, parent


def wait_for_child(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a child.  Raises `subprocess.TimeoutExpired`.

    `Popen.wait` with a time limit sleeps up to 50 ms at a time; this returns at once.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # it was collected before, or the kernel is older than 5.3
        process.wait(seconds)
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(seconds * 1000)
    os.close(pidfd)
    process.wait(0)


def marked_with(mark: str) -> list[int]:
    """Return the process ids of this user's processes whose environment has `PYTEST_FA_MARK` = `mark`."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                pids.append(pid)
    return pids


def kill_all(find: Callable[[], Iterable[int]], seconds: float = END_SECONDS) -> list[int]:
    """Kill what `find` returns until it twice returns nothing; return the processes that are left after `seconds`.

    It is called again because a process may fork before it is killed.  It must return nothing twice because
    `marked_with` does not see a process in the instant in which that process becomes another program: the kernel
    shows an empty environment until the new one is in place.
    """
    deadline = time.monotonic() + seconds
    empty_lists = 0
    while empty_lists < 2:  # noqa: PLR2004
        left = list(find())
        empty_lists = 0 if left else empty_lists + 1
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if left and time.monotonic() > deadline:
            return left
        time.sleep(0.005)
    return []


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  # names, hundreds of them
