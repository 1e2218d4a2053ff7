"""Which operators of torch run inside a call, in every thread."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch.profiler import ExecutionTraceObserver

WAIT_SECONDS = 2.0  # for threads that the call has started and not joined


class _Node(msgspec.Struct):
    name: str


class _Trace(msgspec.Struct):
    nodes: tuple[_Node, ...] = ()


def operators_of(call: Callable[[], object]) -> tuple[str, ...]:
    """Make one call and return the names of the operators that were dispatched meanwhile, sorted.

    torch's execution trace holds those of every thread, also from compiled code.  It attaches to no device, so that it
    does not slow down later launches.  A `TorchDispatchMode` is no alternative: around FlexAttention it breaks
    torch.compile for the rest of the process.
    """
    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer = ExecutionTraceObserver().register_callback(str(path))  # type: ignore[no-untyped-call]
        observer.start()
        try:
            call()
            for thread in set(threading.enumerate()) - before:
                thread.join(WAIT_SECONDS)
        finally:
            observer.stop()
            observer.unregister_callback()  # type: ignore[no-untyped-call]
        trace = msgspec.json.decode(path.read_bytes(), type=_Trace)
    return tuple(sorted({node.name for node in trace.nodes}))
