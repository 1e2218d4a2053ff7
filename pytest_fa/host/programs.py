"""Finds NVIDIA's tools and runs them with a time limit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PLACES = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/nsight-compute/*",
    "/usr/local/NVIDIA-Nsight-Compute*",
    "/usr/local/cuda/nsight-compute*",
    "/usr/local/cuda/compute-sanitizer",
)


class ProgramRun(NamedTuple):
    """The result of one command.  `timed_out` means that it was killed at its time limit."""

    return_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool

    @property
    def text(self) -> str:
        """Standard output and standard error."""
        return f"{self.stdout}\n{self.stderr}"


def find_program(name: str) -> Path | None:
    """Find `ncu` or `compute-sanitizer`: on PATH, in CUDA_HOME, where NVIDIA's installers put it, or in a wheel."""
    if on_path := shutil.which(name):
        return Path(on_path)
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home) / "bin"] if home else []
    folders += [folder for place in PLACES for folder in sorted(Path("/").glob(place.removeprefix("/")), reverse=True)]
    for folder in folders:
        if os.access(folder / name, os.X_OK) and (folder / name).is_file():
            return folder / name
    return _in_wheels(name)


def run_tool(command: list[str], environment: dict[str, str], limit_seconds: float) -> ProgramRun:
    """Run a command to its end, or kill its whole process group at the time limit.

    The return code is 127 if the command cannot be started.
    """
    start = time.monotonic()
    try:
        return _run(command, environment, limit_seconds, start)
    except OSError as problem:
        return ProgramRun(127, "", str(problem), time.monotonic() - start, timed_out=False)


def _run(command: list[str], environment: dict[str, str], limit_seconds: float, start: float) -> ProgramRun:
    with subprocess.Popen(  # noqa: S603
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_seconds)
            return ProgramRun(process.returncode, out, err, time.monotonic() - start, timed_out=False)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            out, err = process.communicate()
            return ProgramRun(process.returncode, out, err, time.monotonic() - start, timed_out=True)


def version_of(program: Path) -> str:
    """The version that the tool prints, such as `2025.3.1`; empty if it prints none."""
    with tempfile.TemporaryDirectory() as scratch:
        version_run = run_tool([str(program), "--version"], {**os.environ, "TMPDIR": scratch}, 60.0)
    match = re.search(r"[Vv]ersion (\d+(?:\.\d+)+)", version_run.text)
    return match[1] if match else ""


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _in_wheels(name: str) -> Path | None:
    """The tool in one of NVIDIA's wheels, which share the package `nvidia` with one folder per CUDA major version."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    paths = (path for folder in folders or () for path in sorted(Path(folder).glob(f"cu*/bin/{name}"), reverse=True))
    return next((path for path in paths if os.access(path, os.X_OK)), None)
