"""Processes that are stopped for a while, with what they have started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from pytest_fa.processes import descendants_of, stopped

# Starts a child that appends a byte to a file every 5 ms, and then does the same itself.
WRITES = """\
import os, sys, time
name = "child" if os.fork() == 0 else "parent"
while True:
    with open(f"{sys.argv[1]}/{name}", "a") as file:
        file.write("x")
    time.sleep(0.005)
"""


def sizes(folder: Path) -> list[int]:
    """How much each process has written."""
    return [path.stat().st_size if (path := folder / name).exists() else 0 for name in ("parent", "child")]


def wait_until_more(folder: Path, than: list[int]) -> bool:
    """Whether both processes write more within 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all(now > before for now, before in zip(sizes(folder), than, strict=True)):
            return True
        time.sleep(0.01)
    return False


def test_processes_are_stopped_and_go_on(tmp_path: Path) -> None:
    """A process and its child do nothing while they are stopped, and go on afterwards."""
    with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)]) as process:
        try:
            assert wait_until_more(tmp_path, [0, 0])
            pids = [process.pid, *descendants_of(process.pid)]
            assert len(pids) == 2
            assert set(pids) <= set(descendants_of(os.getpid()))
            with stopped(lambda: pids):
                time.sleep(0.05)  # a write that has begun is finished
                before = sizes(tmp_path)
                time.sleep(0.2)
                assert sizes(tmp_path) == before
            assert wait_until_more(tmp_path, before)
        finally:
            for pid in (process.pid, *descendants_of(process.pid)):
                os.kill(pid, 9)
