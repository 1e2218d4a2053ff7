"""How the worker server ends its workers: within one limit for all of them, which is shorter than the client's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pytest_fa.host import fork_server
from pytest_fa.processes import END_SECONDS
from pytest_fa.server import process
from tests.worker_jobs import is_running

SLEEPS = "import time; time.sleep(60)"
LIMIT_SECONDS = 1.0  # one for each of three processes would be 3 s


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Three children of this process that do not end by themselves; each has a process group of its own."""
    command = [sys.executable, "-I", "-S", "-c", SLEEPS]
    children = [subprocess.Popen(command, process_group=0) for _ in range(3)]
    yield [child.pid for child in children]
    for child in children:
        child.kill()
        child.wait()


def test_the_limit_is_for_all_processes_together(pids: list[int]) -> None:
    """Three processes that do not end are waited for as long as one."""
    start = time.monotonic()
    assert process._wait_for_all(pids, LIMIT_SECONDS) == {}
    assert LIMIT_SECONDS <= time.monotonic() - start < 3 * LIMIT_SECONDS


def test_each_status_is_known(pids: list[int]) -> None:
    """Of the processes that end within the limit, the status is returned; the others are missing."""
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[2], signal.SIGTERM)
    assert process._wait_for_all(pids, LIMIT_SECONDS) == {pids[0]: signal.SIGKILL, pids[2]: signal.SIGTERM}


def test_workers_that_do_not_end_are_killed_together(pids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get one limit to end by themselves and are then killed; the status is that of the first."""
    monkeypatch.setattr(process, "children_of", lambda _: [])  # this process has other children than a server
    monkeypatch.setattr(process, "zombies_of", lambda _: [])
    start = time.monotonic()
    assert process._end(pids, LIMIT_SECONDS, set()) == signal.SIGKILL
    assert time.monotonic() - start < 3 * LIMIT_SECONDS
    assert [is_running(pid) for pid in pids] == [False] * 3


def test_the_client_waits_longer_than_the_server() -> None:
    """A client that gave up first would kill a server that is about to answer."""
    assert process.DYING_SECONDS + END_SECONDS + process.DYING_SECONDS < fork_server.END_SECONDS
