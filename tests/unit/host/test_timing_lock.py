"""What a process says while it waits for the lock of a GPU."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa import locks
from pytest_fa.host.timing_lock import checking_lock, timing_lock
from pytest_fa.records.environment import Gpu
from tests.fake_nvml import pretend

pytestmark = pytest.mark.usefixtures("fresh_gpu")

H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), "580.1", "13.1")
Lock = Callable[..., AbstractContextManager[None]]


class Waits(RuntimeError):
    """Ends a wait after its line."""


def line_of(lock: Lock) -> str:
    """The line that a process says while it waits for the lock."""
    lines: list[str] = []

    def stop() -> None:
        if lines:
            raise Waits

    with pytest.raises(Waits), lock(lines.append, check=stop):
        pass
    return lines[0]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, H200)
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path,))  # where locks are
    monkeypatch.setattr(locks, "NOTICE_SECONDS", 0.05)


@pytest.mark.parametrize("lock", [timing_lock, checking_lock])
def test_the_process_that_times_is_named(lock: Lock) -> None:
    """Both kinds of wait name the process that times."""
    with timing_lock():
        assert line_of(lock).startswith("waiting for the timing lock of NVIDIA H200, held by process ")


def test_a_check_is_waited_for(snapshot: SnapshotAssertion) -> None:
    """A process that wants to time waits for the end of checks, which have no name."""
    with checking_lock():
        assert snapshot == line_of(timing_lock)


def test_a_holder_that_was_killed_is_not_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Its file says nothing about those that hold the lock now."""
    since = datetime.now(UTC).isoformat()
    with checking_lock():
        (path,) = tmp_path.glob("*.sharing")
        holder = path.with_suffix(".lock.holder")
        holder.write_text(json.dumps({"pid": 2**22 + 1, "command": "gone", "since": since}), encoding="utf-8")
        assert snapshot == line_of(timing_lock)


def test_a_check_behind_a_process_that_waits_to_time(snapshot: SnapshotAssertion) -> None:
    """No process holds the timing lock then."""
    has_ended = threading.Event()

    def end_when_told() -> None:
        if has_ended.is_set():
            raise Waits

    def wait_to_time() -> None:
        with pytest.raises(Waits), timing_lock(lambda _: None, check=end_when_told):
            pass

    waiting = threading.Thread(target=wait_to_time)
    with checking_lock():
        waiting.start()
        lines: list[str] = []
        try:
            while not lines:  # until the other thread waits, the lock can be shared
                lines += lines_of_a_try()
        finally:
            has_ended.set()
            waiting.join(10)
    assert snapshot == lines


def lines_of_a_try() -> list[str]:
    """The lines of a process that takes the lock for checks, or waits until it has said a line."""
    lines: list[str] = []

    def stop() -> None:
        if lines:
            raise Waits

    try:
        with checking_lock(lines.append, check=stop):
            return []
    except Waits:
        return lines


def test_the_lock_does_not_depend_on_tmpdir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two runs with different TMPDIR exclude each other; without a shared folder, the lock is in TMPDIR."""
    shared, temporary = tmp_path / "shared", tmp_path / "temporary"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", (tmp_path / "none", shared))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with timing_lock():
        assert list(temporary.iterdir()) == []
        assert line_of(timing_lock).startswith("waiting for the timing lock of NVIDIA H200, held by process ")
    monkeypatch.setattr("pytest_fa.host.timing_lock.SHARED_FOLDERS", ())
    with timing_lock():
        assert {path.name.partition("-GPU")[0] for path in temporary.iterdir()} == {f"pytest-fa-{os.getuid()}"}
