"""The scheduling of processes that a job must leave as it is: it is read before the job, and restored after it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

_OOM_SCORE = "/proc/{pid}/oom_score_adj"
_LIMITS = tuple(getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_"))


class Scheduling(msgspec.Struct, frozen=True):
    """What another process of the same user can change in a process: its CPUs, its priority and its limits."""

    cpus: frozenset[int]
    nice: int
    policy: tuple[int, int]  # and its priority
    limits: tuple[tuple[int, int], ...]
    oom_score: str
    is_stopped: bool

    def differences(self, now: Scheduling) -> list[str]:
        """Return what has changed, in words."""
        changes = [
            (f"its CPUs from {sorted(self.cpus)} to {sorted(now.cpus)}", self.cpus != now.cpus),
            (f"its nice value from {self.nice} to {now.nice}", self.nice != now.nice),
            ("its scheduling policy", self.policy != now.policy),
            ("its resource limits", self.limits != now.limits),
            ("its oom_score_adj", self.oom_score != now.oom_score),
            ("it was stopped", self.is_stopped != now.is_stopped),
        ]
        return [text for text, has_changed in changes if has_changed]


def read_scheduling(pid: int) -> Scheduling | None:
    """Return the scheduling of a process, or None if it has ended."""
    try:
        return Scheduling(
            cpus=frozenset(os.sched_getaffinity(pid)),
            nice=os.getpriority(os.PRIO_PROCESS, pid),
            policy=(os.sched_getscheduler(pid), os.sched_getparam(pid).sched_priority),
            limits=tuple(resource.prlimit(pid, limit) for limit in _LIMITS),
            oom_score=Path(_OOM_SCORE.format(pid=pid)).read_text(encoding="ascii").strip(),
            is_stopped=_is_stopped(pid),
        )
    except (OSError, ValueError):
        return None


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped.  Its name, in parentheses before its state, may contain anything."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


def restore_scheduling(pid: int, before: Scheduling) -> None:
    """Set the scheduling of a process to what it was, as far as this user may."""
    policy, priority = before.policy
    restoring: tuple[Callable[[], object], ...] = (
        lambda: os.kill(pid, signal.SIGCONT),
        lambda: os.sched_setaffinity(pid, before.cpus),
        lambda: os.sched_setscheduler(pid, policy, os.sched_param(priority)),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, before.nice),
        lambda: Path(_OOM_SCORE.format(pid=pid)).write_text(before.oom_score, encoding="ascii"),
    )
    for restore in restoring:
        with contextlib.suppress(OSError):
            restore()
    for limit, value in zip(_LIMITS, before.limits, strict=True):
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, limit, value)


class GuardedProcess(NamedTuple):
    """A process that a job must leave as it is: how a message calls it, and whether it is another arm of a pair."""

    name: str
    is_arm: bool = False


class Change(NamedTuple):
    """How a job changed a process."""

    process: GuardedProcess
    text: str

    def __str__(self) -> str:
        """The change as a clause."""
        return f"while the variant ran, {self.process.name} changed: {self.text}"


@contextlib.contextmanager
def unchanged_processes(guarded: Mapping[int, GuardedProcess]) -> Iterator[list[Change]]:
    """Restore the CPUs, priority and limits of processes if a job has changed them, and list the changes.

    The oom_score_adj of an arm does not count: it raises its own when it starts, which may be later than this.
    """
    before = {pid: read_scheduling(pid) for pid in guarded}
    changes: list[Change] = []
    try:
        yield changes
    finally:
        for pid, scheduling in before.items():
            now = read_scheduling(pid)
            if now is not None and scheduling is not None and guarded[pid].is_arm:
                scheduling = msgspec.structs.replace(scheduling, oom_score=now.oom_score)  # noqa: PLW2901
            if scheduling is not None and now is not None and scheduling != now:
                restore_scheduling(pid, scheduling)
                changes += [Change(guarded[pid], text) for text in scheduling.differences(now)]
