"""Which operators of torch run inside a call, in every thread."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import memfd_create  # a variant may replace it in `os`
from typing import IO

import msgspec
from torch.profiler import ExecutionTraceObserver

WAIT_SECONDS = 2.0  # for threads that the call has started and not joined


class _Node(msgspec.Struct):
    name: str


class _Trace(msgspec.Struct):
    nodes: tuple[_Node, ...] = ()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch's lines about the trace out of what the variant prints."""
    try:
        kept = os.dup(2)
    except OSError:  # the variant has closed it
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _new_file() -> IO[bytes]:
    """A file in memory, because TMPDIR may be full; in a sandbox without memory files, one in TMPDIR."""
    try:
        return os.fdopen(memfd_create("pytest-fa-trace"), "rb")
    except OSError:
        return tempfile.TemporaryFile()


def operators_of(call: Callable[[], object]) -> tuple[str, ...]:
    """Make one call and return the names of the operators that were dispatched meanwhile, sorted.

    torch's execution trace holds those of every thread, also from compiled code.  It attaches to no device, so that it
    does not slow down later launches.  A `TorchDispatchMode` is no alternative: around FlexAttention it breaks
    torch.compile for the rest of the process.
    """
    before = set(threading.enumerate())
    with _new_file() as file:
        with _silent():  # torch expects a name that ends in .json
            observer = ExecutionTraceObserver().register_callback(f"/proc/self/fd/{file.fileno()}")
            observer.start()
        try:
            call()
            for thread in set(threading.enumerate()) - before:
                thread.join(WAIT_SECONDS)
        finally:
            with _silent():
                observer.stop()
                observer.unregister_callback()
        trace = msgspec.json.decode(file.read(), type=_Trace)
    return tuple(sorted({node.name for node in trace.nodes}))
