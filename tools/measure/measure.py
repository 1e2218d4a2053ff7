"""Runs the pieces of a plan, each with a limit, and keeps what each of them has saved.

The cards of a host measure at the same time, each its own pieces one after another.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.options.options import default_cache
from pytest_fa.records.environment import find_gpus, gpu_folder
from pytest_fa.records.machine_identity import hash_of_gpu
from pytest_fa.records.record import Source
from pytest_fa.records.source import read_source
from tools.measure.plan import LIMIT_SECONDS, TablePiece, TablePlan
from tools.measure.tables import PageTable

SAVE_SECONDS = 40.0  # that an interrupted process gets to save what it has
POLL_SECONDS = 0.2
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


def require_cards(tables: list[PageTable]) -> dict[str, str]:
    """The UUID of each visible GPU, by its hash in records.

    Raises `UsageProblem` without a GPU, or if one is of another kind than the tables.
    """
    folders = sorted({Path(table.folder).name for table in tables})
    gpus = find_gpus()
    if not gpus:
        raise UsageProblem(f"no GPU: the tables are measured on {', '.join(folders)}")
    for gpu in gpus:
        if folders != [gpu_folder(gpu.name)]:
            of_tables = ", ".join(folders)
            raise UsageProblem(
                f"this GPU is {gpu.name}, the tables are of {of_tables}; choose such GPUs with CUDA_VISIBLE_DEVICES"
            )
    cards = {hash_of_gpu(default_cache(), gpu): gpu.uuid for gpu in gpus}
    if None in cards:
        raise UsageProblem(f"{default_cache()} cannot be written: it has to keep what tells this card from others")
    return {card: uuid for card, uuid in cards.items() if card is not None}


def run_pieces(
    root: Path, plan: TablePlan, uuids: Mapping[str, str], seconds: float | None, say: Callable[[str], None]
) -> bool:
    """Run the pieces that fit into `seconds`, those of each card one after another; return whether all were run.

    `uuids` has the UUID of each card, by its hash.  A piece that is expected to end later is not begun, except the
    first of a card; a short one behind it may be.  One that takes longer than its limit is interrupted, so that it
    saves what it has, and then killed.  So are all if this process is interrupted or terminated.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    numbers = itertools.count(1)
    numbered = {card: [(next(numbers), piece) for piece in pieces] for card, pieces in plan.by_card.items()}
    stopped = threading.Event()

    def run_on(card: str | None) -> int:
        left = 0
        for position, (number, piece) in enumerate(numbered[card]):
            limit = min(LIMIT_SECONDS, end - time.monotonic())
            if stopped.is_set() or (end < math.inf and piece.seconds + SAVE_SECONDS > limit and position):
                left += 1
                continue
            name = f"{number}/{len(plan.pieces)}"
            where = f" on card {card}" if len(numbered) > 1 else ""
            say(f"{name}: {piece.title}{where}, about {piece.seconds:.0f} s")
            log = root / LOGS / f"{number}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            visible = {"CUDA_VISIBLE_DEVICES": uuids[card]} if card else {}
            if problem := _run(root, piece, visible, log, limit, stopped):
                say(f"{name}: {problem}: {log.relative_to(root)}")
        return left

    with _terminated_like_interrupted(), ThreadPoolExecutor(max(1, len(numbered))) as pool:
        try:
            left = sum(future.result() for future in as_completed(pool.submit(run_on, card) for card in numbered))
        except BaseException:
            stopped.set()  # the threads end their processes
            raise
    if left:
        say(f"{left} of {len(plan.pieces)} pieces are left: run the same command again")
    return not left


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at SIGTERM, too: a job scheduler sends it at a time limit."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    root: Path, piece: TablePiece, visible: Mapping[str, str], log: Path, limit: float, stopped: threading.Event
) -> str:
    """Run a piece; return how it ended if that is worth a line.  Wrong results (exit status 1) are results."""
    environment = {**os.environ, **visible, **dict(piece.environment)}
    begin = time.monotonic()
    with log.open("wb") as stream:
        stream.write(f"{' '.join(piece.command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(  # noqa: S603
            piece.command, cwd=root, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        while (status := process.poll()) is None:
            seconds = time.monotonic() - begin
            if seconds > limit - SAVE_SECONDS or stopped.wait(POLL_SECONDS):
                _end(process)
                return f"interrupted after {seconds:.0f} s; what it saved is kept"
    return {0: "", 1: "some tests failed"}.get(status, f"exit status {status}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, which then saves its records; kill it and its session if that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SAVE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
