"""A run that waits says for what, and Ctrl-C says what it interrupted and what is kept."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.factories import SLOW_SOURCE
from tests.projects import ONE_CASE, ZERO_MANIFEST, NewProject, Project

ENDLESS = """\
def forward(q, k, v, *, scale, causal="none", out=None):
    open("reached", "w").close()
    while True:
        pass
"""
LIMIT_SECONDS = 60.0
WAIT = re.compile(r"fa: waiting for loop \(launch\) for (\d+) s, a hang after 305 s; 0 of 1 tests")


@pytest.fixture
def looping(new_project: NewProject) -> Project:
    """A project whose only variant never returns from its first call."""
    project = new_project("loop")
    project.python_variant("loop", source=ENDLESS)
    return project


def wait_for(path: Path) -> None:
    """Wait until a kernel has written this file."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


def test_ctrl_c_names_the_variant_that_was_awaited(looping: Project) -> None:
    """The last lines have variant, stage and seconds, and no line of this package's code."""
    with looping.started("--fa-variant=loop", ONE_CASE, "-k", "test_correct") as process:
        wait_for(looping.folder / "reached")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert re.search(r"^!+ interrupted: was waiting for loop \(launch\) for \d+ s !+$", output, re.MULTILINE), output
    assert "KeyboardInterrupt" not in output


@pytest.mark.nightly
def test_the_status_line_names_what_is_awaited(looping: Project) -> None:
    """On a terminal, a line says after 5 s what is awaited, since when, and when it counts as a hang."""
    terminal, inner_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}
    words = ["--pyargs", "pytest_fa.suite", "--fa-variant=loop", ONE_CASE, "-k", "test_correct"]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=looping.folder,
        env={**environment, "PYTEST_FA_SERVER": looping.server},
        stdin=inner_end,
        stdout=inner_end,
        stderr=inner_end,
        start_new_session=True,
    ) as process:
        os.close(inner_end)
        text, deadline = "", time.monotonic() + LIMIT_SECONDS
        while len(WAIT.findall(text)) < 2 and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.5)[0]:
                text += os.read(terminal, 2**16).decode()
        process.send_signal(signal.SIGINT)
    os.close(terminal)
    first, second = map(int, WAIT.findall(text))
    assert 5 <= first < second


@pytest.mark.needs_nvcc
@pytest.mark.nightly
def test_ctrl_c_during_a_build_says_what_is_kept(new_project: NewProject) -> None:
    """Builds that are finished are kept, and the same command compiles only the others."""
    project = new_project("builds")
    project.cuda_variant("quick")
    project.cuda_variant("slow", SLOW_SOURCE, ZERO_MANIFEST + "arch: [sm_80]\n")
    words = ("-k", "test_build", f"--fa-cache={project.folder / 'cache'}")
    assert project.suite("--fa-variant=quick", *words).ret == pytest.ExitCode.OK
    with project.started("--fa-variant=quick,slow", *words) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("fa: building 1 with"):
                break
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert re.search(r"^!+ interrupted: 1 of 2 builds are kept; the same command goes on !+$", output, re.MULTILINE)
    assert "KeyboardInterrupt" not in output
