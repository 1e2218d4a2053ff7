"""One timing at a time on a GPU, across all processes of a user.  No torch."""

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
    """Hold this machine's first GPU (or its CPU) against every other run that times; the lock dies with its holder.

    Taken by whoever starts a timed job, so that waiting for it costs the job none of its own time.
    """
    gpu = find_gpu()
    path = Path(tempfile.gettempdir()) / f"pytest-fa-{os.getuid()}-{gpu.uuid if gpu else 'cpu'}.lock"
    with filelock.FileLock(path):
        yield
