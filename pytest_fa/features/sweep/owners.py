"""Which process runs a trial, and whether it still exists: the trials of a process that ended are released."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from pathlib import Path

from pytest_fa.features.sweep.trial_result import Owner, SweepTrial

STALE_SECONDS = 1800.0  # a trial of another machine that runs for longer has lost its process
NAMELESS_SECONDS = 60.0  # a trial whose process ended before it had said which one it is


@functools.cache
def this_machine() -> str:
    """A hash of this boot and process namespace.  Within both, a process id and its start name one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    namespace = Path("/proc/self/ns/pid").readlink()
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:16]


def this_process() -> Owner:
    """This process as the owner of a trial."""
    started = _started(os.getpid())
    assert started is not None  # noqa: S101  # this process exists
    return Owner(this_machine(), os.getpid(), started)


def is_stale(trial: SweepTrial, now: float | None = None) -> bool:
    """Whether the process of a running trial no longer exists.  For another machine, the trial's age decides."""
    age = (time.time() if now is None else now) - trial.begun
    if trial.owner is None:
        return age > NAMELESS_SECONDS
    if trial.owner.machine == this_machine():
        return _started(trial.owner.pid) != trial.owner.started
    return age > STALE_SECONDS


def _started(pid: int) -> int | None:
    """The start of a process in clock ticks since boot; None if there is none, or if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name in parentheses may contain spaces
    return None if state in "ZX" else int(fields[18])
