"""Locks name their holder: after 5 s of waiting, and when the wait is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pytest_fa import locks
from pytest_fa.errors import LockProblem
from pytest_fa.locks import describe_holder, held_lock, shared_lock
from tests.factories import wait_until

HOLDER = """\
import sys, time
from pathlib import Path
from pytest_fa.locks import held_lock
with held_lock(Path(sys.argv[1]), "the GPU"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def held_elsewhere(path: Path, seconds: float) -> Iterator[int]:
    """Another process holds the lock for a time, or until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(path), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.kill()


def test_a_check_ends_the_wait(tmp_path: Path) -> None:
    """What the check raises ends the wait at once, and the lock is not taken."""

    def refuse() -> None:
        raise RuntimeError

    with held_elsewhere(tmp_path / "lock", 60.0) as pid:
        start = time.monotonic()
        with pytest.raises(RuntimeError), held_lock(tmp_path / "lock", "the GPU", check=refuse):
            pass
        assert time.monotonic() - start < 30
        assert f"process {pid} (" in describe_holder(tmp_path / "lock")


def test_a_free_lock_says_nothing(tmp_path: Path) -> None:
    """Nothing is said, and the holder's file is gone afterwards."""
    lines: list[str] = []
    with held_lock(tmp_path / "lock", "the GPU", lines.append):
        assert f"process {os.getpid()} (" in describe_holder(tmp_path / "lock")
    assert (lines, (tmp_path / "lock.holder").exists()) == ([], False)


@pytest.mark.parametrize(
    "argument",
    [
        "--fa-study=postgresql://me:secret@host/sweeps",
        "--fa-study=postgresql://me:se/secret@ecret:x@host/sweeps",
        "--fa-study=postgresql://:secret@host/sweeps",
        "--fa-study=postgresql://host/sweeps?user=me&password=secret",
    ],
)
def test_a_holder_tells_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str) -> None:
    """The holder's file, which every user may read, has the command without the password of a URL."""
    monkeypatch.setattr(sys, "argv", ["pytest", argument])
    with held_lock(tmp_path / "lock", "the GPU"):
        holder = (tmp_path / "lock.holder").read_text()
        assert ("secret" in holder, "***" in holder, "host/sweeps" in holder) == (False, True, True)


def test_a_wait_names_the_holder(tmp_path: Path) -> None:
    """A line gives the holder's process id, its command, and since when it holds the lock."""
    lines: list[str] = []
    with held_elsewhere(tmp_path / "lock", 60.0) as pid:

        def say(line: str) -> None:
            lines.append(line)
            os.kill(pid, signal.SIGKILL)

        with held_lock(tmp_path / "lock", "the GPU", say, notice_seconds=0.2):
            pass
    (line,) = lines
    assert line.startswith(f"waiting for the GPU, held by process {pid} (-c ")
    assert line.endswith(" s)")
    assert " since " in line


def test_a_wait_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that stays held is an error that names the holder and what to do."""
    monkeypatch.setattr(locks, "MAX_SECONDS", 0.3)
    with (
        held_elsewhere(tmp_path / "lock", 60.0) as pid,
        pytest.raises(LockProblem, match=rf"the GPU is still held by process {pid} \(.*end that process"),
        held_lock(tmp_path / "lock", "the GPU", lambda _: None, notice_seconds=0.1),
    ):
        pass


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    """The operating system releases the lock of a process that was killed."""
    with held_elsewhere(tmp_path / "lock", 60.0):
        pass
    start = time.monotonic()
    with held_lock(tmp_path / "lock", "the GPU"):
        assert time.monotonic() - start < 30  # its holder would have slept for 60 s


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"[" * 10_000, b'{"pid": "x"}', b"\xff", b"x" * 10_000],
    ids=lambda text: ascii(text[:9]),
)
def test_an_unreadable_holder_is_said_to_be_unknown(tmp_path: Path, content: bytes) -> None:
    """Whatever is in the holder's file, there is a sentence."""
    (tmp_path / "lock.holder").write_bytes(content)
    assert describe_holder(tmp_path / "lock") == "a process that has not said who it is"


def test_a_holders_command_is_printable(tmp_path: Path) -> None:
    """Escape sequences in the holder's command do not reach the terminal."""
    since = (datetime.now(UTC) - timedelta(seconds=90)).isoformat()
    (tmp_path / "lock.holder").write_text(
        json.dumps({"pid": 7, "command": "a\x1b[31m", "since": since}), encoding="utf-8"
    )
    text = describe_holder(tmp_path / "lock")
    assert text.startswith("process 7 (a?[31m) since ")
    assert text.endswith("(90 s)")


def test_a_lock_that_cannot_be_opened(tmp_path: Path) -> None:
    """A lock whose file cannot be opened is one sentence."""
    (tmp_path / "lock").mkdir()
    with (
        pytest.raises(LockProblem, match=r"the GPU: the lock .* cannot be used: .*; delete it, or ask its owner to"),
        held_lock(tmp_path / "lock", "the GPU"),
    ):
        pass


@pytest.mark.parametrize("kind", ["symlink", "FIFO"])
def test_what_stands_in_place_of_the_holder_is_not_followed(tmp_path: Path, kind: str) -> None:
    """A symlink or a FIFO in place of the holder's file is replaced; what it points to stays as it is."""
    victim, holder = tmp_path / "victim", tmp_path / "lock.holder"
    victim.write_text("precious", encoding="utf-8")
    if kind == "symlink":
        holder.symlink_to(victim)
    else:
        os.mkfifo(holder)
    assert describe_holder(tmp_path / "lock") == "a process that has not said who it is"
    with held_lock(tmp_path / "lock", "the GPU"):
        assert f"process {os.getpid()} (" in describe_holder(tmp_path / "lock")
    assert victim.read_text(encoding="utf-8") == "precious"


# -- a lock that many share -------------------------------------------------------------------------------------------


class User(threading.Thread):
    """Holds a shared lock in a thread, from `start` until `leave`."""

    def __init__(self, path: Path, lines: list[str], *, alone: bool = False) -> None:
        super().__init__(daemon=True)
        self._path, self._lines, self._alone = path, lines, alone
        self.has_lock, self.may_leave = threading.Event(), threading.Event()

    def run(self) -> None:
        """Hold the lock."""
        with shared_lock(self._path, lambda: "waiting for others", self._lines.append, alone=self._alone):
            self.has_lock.set()
            self.may_leave.wait(30)

    def is_in(self, seconds: float = 10.0) -> bool:
        """Whether it has the lock within these seconds."""
        return self.has_lock.wait(seconds)

    def leave(self) -> None:
        """Release the lock."""
        self.may_leave.set()
        self.join(30)


@pytest.fixture
def use(tmp_path: Path) -> Iterator[Callable[..., User]]:
    """`use(alone=True)`: a thread that holds the lock, or waits for it; all leave at the end."""
    users: list[User] = []

    def start(*, alone: bool = False, lines: list[str] | None = None) -> User:
        users.append(User(tmp_path / "users", [] if lines is None else lines, alone=alone))
        users[-1].start()
        return users[-1]

    yield start
    for user in users:
        user.may_leave.set()  # all of them first, because one may wait for another
    for user in users:
        user.leave()


def test_several_share_a_lock(use: Callable[..., User]) -> None:
    """Two share it at once; one that wants it alone waits for both, and then keeps others out."""
    first, second = use(), use()
    assert first.is_in()
    assert second.is_in()
    alone = use(alone=True)
    first.leave()
    assert not alone.is_in(0.1)
    second.leave()
    assert alone.is_in()
    assert not use().is_in(0.1)
    assert not use(alone=True).is_in(0.1)


def test_who_waits_to_be_alone_is_next(use: Callable[..., User]) -> None:
    """One that comes later does not share the lock before it, so that sharers cannot keep it for ever."""
    first = use()
    assert first.is_in()
    alone = use(alone=True)
    assert not alone.is_in(0.1)
    later = use()
    assert not later.is_in(0.1)
    first.leave()
    assert alone.is_in()
    assert not later.is_in(0.1)
    alone.leave()
    assert later.is_in()


def test_waits_to_hold_it_alone_come_before_waits_to_share_it(use: Callable[..., User]) -> None:
    """Those who share the lock leave it once, and not once for each of the others."""
    first = use()
    assert first.is_in()
    alone = [use(alone=True) for _ in range(2)]
    assert not any(each.is_in(0.1) for each in alone)
    later = use()
    assert not later.is_in(0.1)
    first.leave()
    assert wait_until(lambda: any(each.has_lock.is_set() for each in alone))
    next_first = [each for each in alone if each.has_lock.is_set()]
    assert len(next_first) == 1
    next_first[0].leave()
    assert all(each.is_in() for each in alone)
    assert not later.is_in(0.1)
    for each in alone:
        each.leave()
    assert later.is_in()


def test_a_long_wait_to_share_comes_before_later_waits_to_hold_it_alone(
    monkeypatch: pytest.MonkeyPatch, use: Callable[..., User]
) -> None:
    """Processes that want the lock alone cannot keep it for ever, either, though one of them always waits."""
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 0.2)
    alone = [use(alone=True)]
    assert alone[0].is_in()
    sharer = use()
    for _ in range(20):  # each thread waits for the lock before the previous one releases it
        alone.append(use(alone=True))
        time.sleep(0.05)
        alone[-2].leave()
        assert wait_until(lambda: sharer.has_lock.is_set() or alone[-1].has_lock.is_set())
        if sharer.has_lock.is_set():
            break
    assert sharer.has_lock.is_set()
    assert not alone[-1].has_lock.is_set()
    sharer.leave()
    assert alone[-1].is_in()


def test_a_long_wait_for_a_shared_lock_is_explained(monkeypatch: pytest.MonkeyPatch, use: Callable[..., User]) -> None:
    """One line says what is waited for."""
    monkeypatch.setattr(locks, "NOTICE_SECONDS", 0.05)
    assert use(alone=True).is_in()
    lines: list[str] = []
    user = use(lines=lines)
    assert wait_until(lambda: bool(lines))
    assert (lines, user.has_lock.is_set()) == (["waiting for others"], False)


def test_a_check_ends_the_wait_for_a_shared_lock(tmp_path: Path, use: Callable[..., User]) -> None:
    """What the check raises ends the wait, and nothing is held afterwards."""

    def refuse() -> None:
        raise RuntimeError

    alone = use(alone=True)
    assert alone.is_in()
    with pytest.raises(RuntimeError), shared_lock(tmp_path / "users", lambda: "waiting", check=refuse):
        pass
    alone.leave()
    assert use(alone=True).is_in()


FORKS = """\
import os, sys, time
from pathlib import Path
from pytest_fa.locks import shared_lock
with shared_lock(Path(sys.argv[1]), lambda: "waiting", alone=True):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
print("left", flush=True)
time.sleep(60)
"""


def test_a_child_that_was_forked_meanwhile_holds_nothing(tmp_path: Path, use: Callable[..., User]) -> None:
    """The lock is free when its holder has left, although a child still has the descriptor."""
    command = [sys.executable, "-c", FORKS, str(tmp_path / "users")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "left\n"
        assert use(alone=True).is_in(5.0)
        os.killpg(process.pid, signal.SIGKILL)


def test_the_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could hold it for ever."""
    (tmp_path / "users.line").touch()
    monkeypatch.setattr("pytest_fa.locks.os.getuid", lambda: 4711)
    with pytest.raises(LockProblem, match="another user"), shared_lock(tmp_path / "users", lambda: "waiting"):
        pass


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A symlink in place of the lock is not followed."""
    (tmp_path / "users").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LockProblem, match="users cannot be used"), shared_lock(tmp_path / "users", lambda: "waiting"):
        pass
    assert not (tmp_path / "elsewhere").exists()
