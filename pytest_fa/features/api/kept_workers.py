"""The worker servers that are kept between calls, so that only the first call waits for the import of torch."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_fa.errors import FaError
from pytest_fa.host.client import Workers
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.options.options import Options
from pytest_fa.records.source import read_source
from pytest_fa.session.session import Session

WorkerPair = tuple[Workers, ProfilerWorkers]  # for jobs, and for the profiler

_ONE_CALL = threading.Lock()  # a pair runs one job at a time
_KEPT: dict[tuple[int, Path], WorkerPair] = {}  # by process, since a forked child must not use them, and by cache


@contextmanager
def open_session(options: Options) -> Iterator[Session]:
    """A session of one call, with worker servers of earlier calls if there are any.

    Manifests and sources are read anew.  The workers end with the call, so that they hold no memory of the GPU and the
    next call imports Python kernels anew.  After an interrupt (Ctrl-C), the servers end as well.
    """
    read_source.cache_clear()  # a source may have been edited since the last call
    with _ONE_CALL, _kept_workers(options.cache) as (workers, profiler_workers):
        yield Session(options, workers, profiler_workers)


@contextmanager
def _kept_workers(cache: Path) -> Iterator[WorkerPair]:
    key, is_usable = (os.getpid(), cache), False
    pair = _KEPT.setdefault(key, (Workers(cache), ProfilerWorkers(cache)))
    try:
        yield pair
        is_usable = True
    except FaError:
        is_usable = True
        raise
    finally:
        if not is_usable:
            _KEPT.pop(key, None)
        for workers in pair:
            if is_usable:
                workers.end_worker()
            else:
                workers.close()


def close_workers() -> None:
    """End every worker server of this process.  The next call starts another one."""
    for key in [key for key in _KEPT if key[0] == os.getpid()]:
        for workers in _KEPT.pop(key):
            workers.close()


atexit.register(close_workers)
