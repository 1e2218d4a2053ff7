"""Runs the pieces of a plan one after another, each with a limit, and keeps what each of them has saved."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.options.options import default_cache
from pytest_fa.records.environment import find_gpu, gpu_folder
from pytest_fa.records.machine_identity import hash_of_gpu
from pytest_fa.records.record import Source
from pytest_fa.records.source import read_source
from tools.measure.plan import LIMIT_SECONDS, TablePiece, TablePlan
from tools.measure.tables import PageTable

SAVE_SECONDS = 40.0  # that an interrupted process gets to save what it has
LOGS = Path("artifacts", "measure")


def require_clean(root: Path) -> Source:
    """The commit of the tree.  Raises `UsageProblem` without one, or if the tree has uncommitted changes."""
    source = read_source(root)
    if source.commit is None:
        raise UsageProblem(f"{root} has no commit ({source.origin}): records must name one; measure in a git checkout")
    if source.dirty:
        raise UsageProblem(
            "the tree has uncommitted changes outside of profiles/: commit them, or `git stash -u`, first"
        )
    return source


def require_card(tables: list[PageTable]) -> str:
    """The hash of this GPU.  Raises `UsageProblem` without a GPU, or if the tables are of another kind of GPU."""
    folders = sorted({Path(table.folder).name for table in tables})
    gpu = find_gpu()
    if gpu is None:
        raise UsageProblem(f"no GPU: the tables are measured on {', '.join(folders)}")
    if folders != [gpu_folder(gpu.name)]:
        raise UsageProblem(f"this GPU is {gpu.name}, the tables are of {', '.join(folders)}")
    card = hash_of_gpu(default_cache(), gpu)
    if card is None:
        raise UsageProblem(f"{default_cache()} cannot be written: it has to keep what tells this card from others")
    return card


def run_pieces(root: Path, plan: TablePlan, seconds: float | None, say: Callable[[str], None]) -> bool:
    """Run the pieces that fit into `seconds`; return whether all were run.

    A piece that is expected to end later is not begun, except the first; a short one behind it may be.  One that takes
    longer than its limit is interrupted, so that it saves what it has, and then killed.
    """
    end = None if seconds is None else time.monotonic() + seconds
    left = 0
    for number, piece in enumerate(plan.pieces, 1):
        limit = LIMIT_SECONDS if end is None else min(LIMIT_SECONDS, end - time.monotonic())
        if end is not None and piece.seconds + SAVE_SECONDS > limit and number > 1:
            left += 1
            continue
        say(f"{number}/{len(plan.pieces)}: {piece.title}, about {piece.seconds:.0f} s")
        log = root / LOGS / f"{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if problem := _run(root, piece, log, limit):
            say(f"{number}/{len(plan.pieces)}: {problem}: {log.relative_to(root)}")
    if left:
        say(f"{left} of {len(plan.pieces)} pieces are left: run the same command again")
    return not left


def _run(root: Path, piece: TablePiece, log: Path, limit: float) -> str:
    """Run a piece; return how it ended if that is worth a line.  Wrong results (exit status 1) are results."""
    environment = {**os.environ, **dict(piece.environment)}
    with log.open("wb") as stream:
        stream.write(f"{' '.join(piece.command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(  # noqa: S603
            piece.command, cwd=root, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            status = process.wait(max(0.0, limit - SAVE_SECONDS))
        except subprocess.TimeoutExpired:
            _end(process)
            return f"interrupted after {limit - SAVE_SECONDS:.0f} s; what it saved is kept"
        except BaseException:
            _end(process)
            raise
    return {0: "", 1: "some tests failed"}.get(status, f"exit status {status}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, which then saves its records; kill it and its session if that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SAVE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
