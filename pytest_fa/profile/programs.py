"""Finding NVIDIA's tools, and running one with a limit on its time."""

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
    """What one command gave; `timed_out` says that it was killed."""

    return_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool

    @property
    def text(self) -> str:
        """Both streams."""
        return f"{self.stdout}\n{self.stderr}"


def find_program(name: str) -> Path | None:
    """`ncu` or `compute-sanitizer`: from PATH, a toolkit, the places it is installed to, or a wheel."""
    if on_path := shutil.which(name):
        return Path(on_path)
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home) / "bin"] if home else []
    folders += [found for place in PLACES for found in sorted(Path("/").glob(place.removeprefix("/")), reverse=True)]
    for folder in folders:
        if os.access(folder / name, os.X_OK) and (folder / name).is_file():
            return folder / name
    return _in_wheels(name)


def run_tool(command: list[str], environment: dict[str, str], limit_seconds: float) -> ProgramRun:
    """Run to the end, or kill the whole process group when time is up; 127 where it cannot be started."""
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
    """What the tool says of itself: `2025.3.1`, or an empty string."""
    with tempfile.TemporaryDirectory() as scratch:
        ran = run_tool([str(program), "--version"], {**os.environ, "TMPDIR": scratch}, 60.0)
    found = re.search(r"[Vv]ersion (\d+(?:\.\d+)+)", ran.text)
    return found[1] if found else ""


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _in_wheels(name: str) -> Path | None:
    """NVIDIA's wheels share the folder `nvidia`, with a folder for each major version of CUDA."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    found = (path for folder in folders or () for path in sorted(Path(folder).glob(f"cu*/bin/{name}"), reverse=True))
    return next((path for path in found if os.access(path, os.X_OK)), None)
