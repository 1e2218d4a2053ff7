"""Processes that are killed or interrupted: records stay readable, the cache usable, and no process is left.

A few combinations of process, signal and stage run in each test of a change, the others in the nightly run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.processes import children_of
from pytest_fa.records.read import read_record
from pytest_fa.records.record import SCHEMA
from tests.factories import MANIFEST, PYTHON_SOURCE, SLOW_SOURCE
from tests.projects import ONE_CASE, NewProject, Project

LEFT_SECONDS = 2.0  # after which no process of a run may be left
REACH_SECONDS = 90.0

# The variant waits when it reaches the stage: in its first call, in a timed call, or in a process of the gate.
WAITS = """\
import os, time
CALLS = []
def reached():
    open("reached", "w").close()
    time.sleep(120)
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
def wait():
    CALLS.append(1)
    if os.environ["FA_STAGE"] == "check" and len(CALLS) == 1: reached()
    if os.environ["FA_STAGE"] == "time" and len(CALLS) == 6: reached()
    if os.environ["FA_STAGE"] == "gate" and len(set(open("pids").read().split())) >= 2: reached()
"""
ARGUMENTS = {
    "build": ["-k", "test_build"],
    "check": ["-k", "test_correct"],
    "time": ["-k", "test_speed", "--fa-soak=1"],
    "gate": ["--fa-gate=20", "--fa-gate-baseline=good", "-k", "test_gate", "--fa-soak=1"],
}
COMBINATIONS = [
    (process, ending, stage)
    for process, stages in {
        "pytest": ("build", "check", "time", "gate"),
        "server": ("check", "time", "gate"),
        "worker": ("check", "time", "gate"),
        "ninja": ("build",),
    }.items()
    for ending in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    for stage in stages
]
ALWAYS = [
    ("pytest", signal.SIGKILL, "check"),
    ("server", signal.SIGKILL, "check"),
]
RUNS = [
    pytest.param(
        *combination,
        id=f"{combination[0]}-{combination[1].name}-{combination[2]}",
        marks=[] if combination in ALWAYS else [pytest.mark.nightly],
    )
    for combination in COMBINATIONS
]


@pytest.fixture
def project(new_project: NewProject, request: pytest.FixtureRequest) -> Project:
    """A project with one correct variant, one that waits, and one that compiles slowly."""
    stage = request.node.callspec.params["stage"]
    project = new_project("kills")
    project.python_variant("good")
    waiting = PYTHON_SOURCE.replace("    scores =", "    wait()\n    scores =", 1)
    project.python_variant("waiting", source=WAITS + waiting)
    if stage == "build":
        project.write("kernels/slow/variant.yaml", MANIFEST + "arch: [sm_80]\n")
        project.write("kernels/slow/kernel.cu", SLOW_SOURCE)
    return project


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def _marked(mark: str) -> list[str]:
    """The processes of a run, with their commands; zombies have no environment and do not count."""
    processes = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if f"FA_KILLS={mark}".encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    processes.append(f"{path.name} {command[:80]}")
            except OSError:
                continue
    return processes


def _child(pid: int, word: str) -> int | None:
    """The child of a process whose command contains a word."""
    for child in children_of(pid):
        try:
            if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        except OSError:
            continue
    return None


def _target(pid: int, process: str) -> int | None:
    if process == "pytest":
        return pid
    if process == "ninja":
        return _child(pid, "ninja")
    server = _child(pid, "--serve")
    if process == "server" or server is None:
        return server
    return next(iter(children_of(server)), None)


def _is_reached(project: Project, pid: int, stage: str) -> bool:
    if stage == "build":
        ninja = _child(pid, "ninja")
        return ninja is not None and bool(children_of(ninja))
    return (project.folder / "reached").exists()


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(("process", "ending", "stage"), RUNS)
def test_order_after_a_kill(project: Project, process: str, ending: signal.Signals, stage: str) -> None:
    """Every record line is readable, no process of the run is left after two seconds, and the next run passes."""
    mark = uuid.uuid4().hex
    name = "slow" if stage == "build" else "waiting"
    variants = name if stage == "gate" else f"good,{name}"
    words = ["--pyargs", "pytest_fa.suite", ONE_CASE, f"--fa-cache={project.cache / mark}", f"--fa-variant={variants}"]
    environment = {**os.environ, "FA_KILLS": mark, "FA_STAGE": stage, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, *ARGUMENTS[stage]],
        cwd=project.folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        assert _until(lambda: _is_reached(project, run.pid, stage), REACH_SECONDS)
        target = _target(run.pid, process)
        assert target is not None
        os.kill(target, ending)
        if process != "pytest":  # pytest itself goes on: it is ended here, after it had time to notice
            _until(lambda: run.poll() is not None, 3.0)
            run.send_signal(signal.SIGINT)
        assert _until(lambda: run.poll() is not None, 20.0)
        assert _until(lambda: not _marked(mark), LEFT_SECONDS), _marked(mark)
    files = list((project.folder / "artifacts" / "records").glob("*.jsonl"))
    lines = [line for path in files for line in path.read_bytes().splitlines()]
    assert [read_record(line).schema for line in lines] == [SCHEMA] * len(lines)
    (project.folder / "reached").unlink(missing_ok=True)
    good = project.suite("--fa-variant=good", ONE_CASE, "-k", "test_correct", f"--fa-cache={project.cache / mark}")
    assert good.ret == pytest.ExitCode.OK
    assert list((project.cache / mark).glob(".stage-*")) == [] or stage == "build"
