"""A file lock that tells who holds it, and one that many processes can share.

The operating system releases a lock when its holder ends, also after a kill.  Beside a `held_lock` stands a file with
the holder's process id, command and start time, which a waiting process shows.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_fa.errors import LockProblem
from pytest_fa.regular_file import open_regular

if TYPE_CHECKING:
    import filelock

_WAITING = re.compile(r"(?:\w+: )?waiting for ")
NOTICE_SECONDS = 5.0  # a wait that is longer is explained
MAX_SECONDS = 3600.0
CHECK_SECONDS = 0.2
POLL_SECONDS = 0.005
PATIENCE_SECONDS = 10.0  # a longer wait to share a lock comes before later waits to hold it alone
MAX_HOLDER_BYTES = 4096


class _Holder(NamedTuple):
    pid: int
    command: str
    since: datetime


def to_stderr(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{text}\n")


def tells_wait(text: str) -> bool:
    """Whether a line says that this process waits for another one, which a user must know in any case."""
    return _WAITING.match(text) is not None


def say_waits(text: str) -> None:
    """Write a line to stderr if it tells of a wait."""
    if tells_wait(text):
        to_stderr(f"fa: {text}")


def go_on() -> None:
    """Go on waiting."""


@contextmanager
def held_lock(
    path: Path,
    what: str,
    say: Callable[[str], object] = to_stderr,
    *,
    notice_seconds: float = NOTICE_SECONDS,
    check: Callable[[], object] = go_on,
) -> Iterator[None]:
    """Hold the lock `path`, which protects `what`.

    After `notice_seconds` of waiting, `say` gets a line with the holder and since when it holds the lock.  `check` is
    called a few times per second during a wait; what it raises ends the wait.  Raises `LockProblem` if the lock is not
    free after an hour, or if this user may not open its file.
    """
    lock = _file_lock(path)
    try:
        _acquire(lock, path, what, say, notice_seconds, check)
    except OSError as problem:
        raise _unusable(path, what, problem) from None
    with _holding(lock, path):
        yield


@contextmanager
def lock_if_free(path: Path, what: str) -> Iterator[bool]:
    """Hold the lock `path` if no other process holds it; yield whether it is held.  Another thread may release it.

    Raises `LockProblem` if this user may not open its file.
    """
    lock = _file_lock(path)
    try:
        is_free = _is_acquired(lock, 0.0, go_on)
    except OSError as problem:
        raise _unusable(path, what, problem) from None
    with _holding(lock, path) if is_free else contextlib.nullcontext():
        yield is_free


def _file_lock(path: Path) -> filelock.BaseFileLock:
    import filelock  # noqa: PLC0415  # 8 ms, only for a run that builds or times

    return filelock.FileLock(path, thread_local=False)


def _unusable(path: Path, what: str, problem: OSError) -> LockProblem:
    return LockProblem(f"{what}: the lock {path} cannot be used: {problem}; delete it, or ask its owner to")


@contextmanager
def _holding(lock: filelock.BaseFileLock, path: Path) -> Iterator[None]:
    """Say beside the lock that this process holds it, and release it at the end."""
    holder = _holder_path(path)
    try:
        with contextlib.suppress(OSError):
            holder.unlink(missing_ok=True)  # what stands there may be a symlink or a FIFO
            descriptor = os.open(holder, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(json.dumps(_this_process()))
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        lock.release()


def _acquire(
    lock: filelock.BaseFileLock,
    path: Path,
    what: str,
    say: Callable[[str], object],
    notice_seconds: float,
    check: Callable[[], object],
) -> None:
    if _is_acquired(lock, notice_seconds, check):
        return
    say(f"waiting for {what}, held by {describe_holder(path)}")
    if not _is_acquired(lock, MAX_SECONDS, check):
        text = f"{what} is still held by {describe_holder(path)} after {MAX_SECONDS:.0f} s; end that process"
        raise LockProblem(text)


def _is_acquired(lock: filelock.BaseFileLock, seconds: float, check: Callable[[], object]) -> bool:
    """Whether the lock could be taken within these seconds.  `check` is called after each fifth of a second."""
    import filelock  # noqa: PLC0415  # as above

    deadline = time.monotonic() + seconds
    while True:
        try:
            lock.acquire(timeout=min(CHECK_SECONDS, max(0.0, deadline - time.monotonic())))
        except filelock.Timeout:
            check()
            if time.monotonic() >= deadline:
                return False
        else:
            return True


@contextmanager
def shared_lock(
    path: Path,
    wait_text: Callable[[], str],
    say: Callable[[str], object] = to_stderr,
    *,
    alone: bool = False,
    check: Callable[[], object] = go_on,
) -> Iterator[None]:
    """Hold the lock `path` together with others, or alone.

    Processes that wait to hold the lock alone get it one after another.  Processes that want to share it wait until no
    process waits to hold it alone, but after `PATIENCE_SECONDS` they are next.  After 5 s of waiting, `say` gets
    `wait_text()`.  `check` is called during a wait; what it raises ends the wait.  Raises `LockProblem` if the lock is
    not free after an hour, or if this user may not open its file.
    """
    wait = _Wait(wait_text, say, check)
    with contextlib.ExitStack() as stack:
        names = (path.with_name(f"{path.name}.impatient"), path.with_name(f"{path.name}.line"), path)
        impatient, line, users = (_opened(name, stack) for name in names)
        if alone:
            wait.until_free(impatient, fcntl.LOCK_SH)
            wait.until_free(line, fcntl.LOCK_SH)
        elif not wait.until_free(line, fcntl.LOCK_EX, PATIENCE_SECONDS):
            wait.until_free(impatient, fcntl.LOCK_EX)  # no later wait to hold it alone takes the line now
            wait.until_free(line, fcntl.LOCK_EX)
        fcntl.flock(impatient, fcntl.LOCK_UN)
        wait.until_free(users, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(line, fcntl.LOCK_UN)
        yield


def _opened(path: Path, stack: contextlib.ExitStack) -> int:
    """The descriptor of a lock's file, released and closed with the stack."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise LockProblem(f"the lock {path} cannot be used: {problem}; delete it, or ask its owner to") from None
    stack.callback(os.close, descriptor)
    if os.fstat(descriptor).st_uid != os.getuid():
        raise LockProblem(f"the lock {path} cannot be used: it belongs to another user; ask its owner to delete it")
    # A child that was forked meanwhile has the same descriptor, and would go on holding the lock.
    stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
    return descriptor


class _Wait:
    """One wait for several locks, of which one line is said, and which ends after an hour."""

    def __init__(self, wait_text: Callable[[], str], say: Callable[[str], object], check: Callable[[], object]) -> None:
        self._wait_text, self._say, self._check = wait_text, say, check
        self._start, self._is_said = time.monotonic(), False

    def until_free(self, descriptor: int, operation: int, seconds: float = math.inf) -> bool:
        """Take a lock; return False if it is not free within these seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                self._go_on()
                if time.monotonic() >= deadline:
                    return False
                time.sleep(POLL_SECONDS)
            else:
                return True

    def _go_on(self) -> None:
        """Say the line when it is time, and raise `LockProblem` when the wait is too long."""
        self._check()
        waited_seconds = time.monotonic() - self._start
        if waited_seconds > NOTICE_SECONDS and not self._is_said:
            self._say(self._wait_text())
            self._is_said = True
        if waited_seconds > MAX_SECONDS:
            text = f"still {self._wait_text()}, after {MAX_SECONDS:.0f} s; end what holds it"
            raise LockProblem(text) from None


def is_held(path: Path) -> bool:
    """Whether a process that has not ended says that it holds the `held_lock`."""
    holder = _read_holder(path)
    return holder is not None and Path(f"/proc/{holder.pid}").exists()


def describe_holder(path: Path) -> str:
    """Return the holder of a lock in words: its process id, its command, and since when it holds the lock."""
    holder = _read_holder(path)
    if holder is None:
        return "a process that has not said who it is"
    shown = "".join(character if character.isprintable() else "?" for character in holder.command)
    seconds = (datetime.now(UTC) - holder.since).total_seconds()
    return f"process {holder.pid} ({shown}) since {holder.since.astimezone():%H:%M:%S} ({seconds:.0f} s)"


def _read_holder(path: Path) -> _Holder | None:
    """What the holder of a lock wrote; None if that is no such text."""
    try:
        with open_regular(_holder_path(path), follow=False) as stream:
            content = json.loads(stream.read(MAX_HOLDER_BYTES))
        holder = _Holder(int(content["pid"]), str(content["command"]), datetime.fromisoformat(content["since"]))
        _ = datetime.now(UTC) - holder.since
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return holder


def _this_process() -> dict[str, object]:
    name = Path(sys.argv[0]).name or "python"
    command = shlex.join([name, *map(_without_password, sys.argv[1:])])
    return {"pid": os.getpid(), "command": command[:200], "since": datetime.now(UTC).isoformat()}


def _without_password(argument: str) -> str:
    """An argument of the command as other users may read it: passwords in an URL are masked."""
    masked = re.sub(r"(://[^:/?#@]*):.*@", r"\1:***@", argument, flags=re.DOTALL)
    return re.sub(r"([?&][^=&]*(?:passw|pwd|secret|token)[^=&]*=)[^&]*", r"\1***", masked, flags=re.IGNORECASE)


def _holder_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")
