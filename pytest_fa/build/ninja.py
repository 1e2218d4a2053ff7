"""Run a batch of compile jobs with ninja: in parallel, each with its own log; a failure does not stop other jobs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import ninja

from pytest_fa.errors import ToolchainError
from pytest_fa.processes import MARK, dying_with_parent, kill_all, marked_with

GIB_PER_JOB = 2.0
SECONDS_PER_JOB = 5.0  # the mean of the kernels in this repository, on one of two cores that compile
MIN_ANNOUNCED_SECONDS = 30.0
MAX_SECONDS = 3600.0  # of one batch; the compilers are ended then
MAX_LOG_SECONDS = 2.0  # until ninja has written the line of a job
LOOK_SECONDS = 0.005
_RUNNING: set[subprocess.Popen[str]] = set()  # the batches that run now


class CompileJob(msgspec.Struct, frozen=True):
    """One command that runs in `<stage>/<folder>`, writes the file `output` there, and logs to `log.txt`.

    `after` is an output of another job, relative to the stage, that must exist first.
    """

    folder: str
    output: str
    command: tuple[str, ...]
    title: str
    after: str | None = None


def run_jobs(
    stage: Path, jobs: list[CompileJob], say: Callable[[int, int, str], None], at_once: int | None = None
) -> None:
    """Run all jobs, `at_once` of them in parallel.

    `say(done, total, title)` is called when a job ends.  A job has succeeded if its output file exists.  Raises
    `ToolchainError` if ninja itself fails.
    """
    (stage / "build.ninja").write_text(_build_file(jobs), encoding="utf-8")
    program = Path(ninja.BIN_DIR) / "ninja"
    command = [str(program), "-k", "0", "-j", str(at_once or parallel_jobs())]
    mark = uuid.uuid4().hex
    try:
        lines = _run_ninja(command, stage, mark, say)
    finally:
        kill_all(lambda: marked_with(mark))  # what a ninja that was killed has left
    if not any((stage / job.folder / "log.txt").exists() for job in jobs):
        raise ToolchainError(f"ninja ran nothing: {''.join(lines).strip()[-500:]}")


def _run_ninja(command: list[str], stage: Path, mark: str, say: Callable[[int, int, str], None]) -> list[str]:
    """Run ninja and return its output.  Raises `ToolchainError` if it takes longer than `MAX_SECONDS`.

    ninja ends its compilers when it gets SIGTERM, which the kernel sends it if this process is killed.
    """
    environment = {**os.environ, "NINJA_STATUS": "%f %t ", MARK: mark}
    with subprocess.Popen(  # noqa: S603
        dying_with_parent(command, signal.SIGTERM),
        cwd=stage,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        timer = threading.Timer(MAX_SECONDS, process.terminate)
        timer.daemon = True
        timer.start()
        _RUNNING.add(process)
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if done := re.match(r"(\d+) (\d+) (.*)", line):
                say(int(done[1]), int(done[2]), done[3])
        _RUNNING.discard(process)
        timed_out = not timer.is_alive()
        timer.cancel()
    if timed_out:
        raise ToolchainError(f"the build took longer than {MAX_SECONDS:.0f} s and was ended")
    return lines


def end_running() -> None:
    """End the compilers of the batches that other threads of this process run now; unfinished jobs fail."""
    for process in tuple(_RUNNING):
        process.terminate()


def seconds_of(stage: Path, folder: str) -> float:
    """Return the seconds of a successful job.  ninja writes them just after it has said that the job has ended."""
    deadline = time.monotonic() + MAX_LOG_SECONDS
    while (seconds := _seconds(stage / ".ninja_log").get(folder)) is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return seconds or 0.0


def _seconds(log: Path) -> dict[str, float]:
    """Return the seconds of each job from ninja's log, whose lines hold start and end in ms, and the output."""
    if not log.is_file():
        return {}
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [line.split("\t") for line in lines if line.endswith("\n") and not line.startswith("#")]
    return {row[3].split("/")[0]: (int(row[1]) - int(row[0])) / 1000 for row in rows}


def parallel_jobs() -> int:
    """Return the number of parallel compilers: one per core, but at most one per 2 GiB of available memory."""
    cores = len(os.sched_getaffinity(0))
    meminfo = Path("/proc/meminfo")
    available = (
        re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii")) if meminfo.is_file() else None
    )
    fitting = int(int(available[1]) / 2**20 / GIB_PER_JOB) if available else cores
    return max(1, min(cores, fitting))


def about(jobs: int, at_once: int) -> str:
    """Return roughly how long this many jobs take, such as `, about 3 minutes`; empty for less than half a minute."""
    seconds = jobs / at_once * SECONDS_PER_JOB
    if seconds < MIN_ANNOUNCED_SECONDS:
        return ""
    minutes = max(1, round(seconds / 60))
    return f", about {minutes} minute{'s' * (minutes > 1)}"


def _build_file(jobs: list[CompileJob]) -> str:
    """Return the text of build.ninja.  Raises `ToolchainError` for a control character, which could end a line."""
    for job in jobs:
        for text in (job.folder, job.output, job.title, *job.command):
            if not text.isprintable():
                raise ToolchainError(f"{job.title!r}: the command contains a control character: {text!r}")
    lines = ["ninja_required_version = 1.5", "rule run", "  command = $line", "  description = $title", ""]
    for job in jobs:
        after = f" | {_path(job.after)}" if job.after else ""
        lines.append(f"build {_path(f'{job.folder}/{job.output}')}: run{after}")
        lines.append(
            f"  line = cd {_value(shlex.quote(job.folder))} && {_value(shlex.join(job.command))} > log.txt 2>&1"
        )
        lines.append(f"  title = {_value(job.title)}")
    return "\n".join(lines) + "\n"


def _path(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _value(text: str) -> str:
    return text.replace("$", "$$")
