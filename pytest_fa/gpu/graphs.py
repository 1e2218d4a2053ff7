"""CUDA graphs of calls, and the time between two events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from pytest_fa.errors import FaError, LaunchError


class CannotCapture(FaError):
    """A call cannot be part of a CUDA graph; the message gives the reason."""


def capture(
    call: Callable[[], object], calls: int, begin: Callable[[], object] = lambda: None, *, keep_graph: bool = False
) -> torch.cuda.CUDAGraph:
    """Capture `calls` calls in a row as a CUDA graph, on a new stream.  Raises `CannotCapture` with CUDA's message.

    One call is made before the capture.  `begin` is called after it, before the captured calls.  With `keep_graph`, the
    nodes of the graph can be read.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # the set-up of a first call on a stream is not captured
        begin()
        try:
            graph.capture_begin()
            for _ in range(calls):
                call()
            graph.capture_end()
            if keep_graph:
                graph.instantiate()  # otherwise the first replay does it
        except (RuntimeError, LaunchError) as problem:
            with suppress(RuntimeError):
                graph.capture_end()
            raise CannotCapture(f"cannot be captured: {str(problem).splitlines()[0]}") from problem
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def event_us(work: Callable[[], object], times: int = 1) -> float:
    """Microseconds between two events on the current stream, with `work` called `times` times in between."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000
