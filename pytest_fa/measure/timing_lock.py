"""A lock that allows one timed run at a time on a GPU, across all processes of a user.  No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from pytest_fa.locks import go_on, held_lock, to_stderr
from pytest_fa.records.environment import Gpu, find_gpu


def timing_lock(
    say: Callable[[str], object] = to_stderr, gpu: Gpu | None = None, *, check: Callable[[], object] = go_on
) -> AbstractContextManager[None]:
    """Hold the lock of `gpu`; by default of this machine's first GPU, or of its CPU if it has no GPU.

    The lock is released when the process that holds it ends.  It is taken by the process that starts a timed job, so
    that the time spent waiting for the lock does not count against the job's time limit.  After 5 s of waiting, `say`
    gets a line with the holder.  What `check` raises ends the wait.
    """
    gpu = gpu or find_gpu()
    path = Path(tempfile.gettempdir()) / f"pytest-fa-{os.getuid()}-{gpu.uuid if gpu else 'cpu'}.lock"
    return held_lock(path, f"the timing lock of {gpu.name if gpu else 'this CPU'}", say, check=check)
