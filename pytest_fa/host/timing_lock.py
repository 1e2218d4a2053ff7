"""Locks of a GPU, across all processes of a user: one times alone, or several check.  No torch.

They are in a folder that does not depend on TMPDIR: runs with another TMPDIR use the same GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pytest_fa.locks import describe_holder, go_on, held_lock, is_held, shared_lock, to_stderr
from pytest_fa.records.environment import Gpu, find_gpu

SHARED_FOLDERS = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108  # only locks, whose names have the user's id


def timing_lock(
    say: Callable[[str], object] = to_stderr, gpu: Gpu | None = None, *, check: Callable[[], object] = go_on
) -> AbstractContextManager[None]:
    """Hold the lock of `gpu`; by default of this machine's first GPU, or of its CPU if it has no GPU.

    Meanwhile no other process of this user times or checks anything on the GPU; on a CPU, others may check.  The lock
    is released when the process that holds it ends.  It is taken by the process that starts a timed job, so that the
    time spent waiting for the lock does not count against the job's time limit.  After 5 s of waiting, `say` gets a
    line about the wait.  What `check` raises ends the wait.
    """
    name, path = _lock_of(gpu or find_gpu())

    def wait_text() -> str:
        return _wait_text(name, path) if is_held(path) else f"waiting for the end of checks on {name}"

    held = held_lock(path, f"the timing lock of {name}", say, check=check)
    return _both(shared_lock(_users_path(path), wait_text, say, alone=True, check=check), held)


def checking_lock(
    say: Callable[[str], object] = to_stderr, *, check: Callable[[], object] = go_on
) -> AbstractContextManager[None]:
    """Hold the lock of this machine's first GPU together with other checks, while nothing is timed on it."""
    name, path = _lock_of(find_gpu())

    def wait_text() -> str:
        return _wait_text(name, path) if is_held(path) else f"waiting for a process that waits to time on {name}"

    return shared_lock(_users_path(path), wait_text, say, check=check)


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield


def _wait_text(name: str, path: Path) -> str:
    return f"waiting for the timing lock of {name}, held by {describe_holder(path)}"


def _lock_of(gpu: Gpu | None) -> tuple[str, Path]:
    """The name of a GPU or of the CPU, and the path of its lock."""
    path = _lock_folder() / f"pytest-fa-{os.getuid()}-{gpu.uuid if gpu else 'cpu'}.lock"
    return gpu.name if gpu else "this CPU", path


def _lock_folder() -> Path:
    """The first shared folder that this user may write to; without one, that for temporary files."""
    usable = (folder for folder in SHARED_FOLDERS if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))
    return next(usable, None) or Path(tempfile.gettempdir())


def _users_path(path: Path) -> Path:
    return path.with_suffix(".sharing")
