"""A lock that allows one timed run at a time on a GPU, across all processes of a user.  No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from pytest_fa.records.environment import find_gpu


@contextmanager
def timing_lock() -> Iterator[None]:
    """Hold the lock of this machine's first GPU, or of its CPU if it has no GPU.

    The lock is released when the process that holds it ends.  It is taken by the process that starts a timed job, so
    that the time spent waiting for the lock does not count against the job's time limit.
    """
    gpu = find_gpu()
    path = Path(tempfile.gettempdir()) / f"pytest-fa-{os.getuid()}-{gpu.uuid if gpu else 'cpu'}.lock"
    with filelock.FileLock(path):
        yield
