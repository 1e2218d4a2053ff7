"""`cold_us`: the time of one call whose inputs are not in the L2 cache.

A CUDA graph repeats this sequence: read twice the L2's size, record an event, make one call, record an event.  The read
evicts the inputs and fills the L2 with clean lines, so that no write-back follows.  The figure includes the cost of two
events; the cold time of an empty kernel shows how much that is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_fa.measure.device_time import capture
from pytest_fa.measure.sampling import timing
from pytest_fa.records.timing import Timing
from pytest_fa.run.device_tools import DeviceTools

CALLS = 10  # in a graph
REPLAYS = 5
LONG_CALL_US = 5000.0  # from this length on, a graph has one call


def cold_time(
    call: Callable[[], object],
    begin: Callable[[], object],
    tools: DeviceTools,
    estimate_us: float,
    before_launch: Callable[[], object] = lambda: None,
) -> Timing:
    """Measure single calls, each after `tools.clean_l2`.  `begin` is called before the calls that are captured.

    Raises `CannotCapture` if the call cannot be part of a CUDA graph.
    """
    count = CALLS if estimate_us < LONG_CALL_US else 1
    ends = [(_event(), _event()) for _ in range(count)]

    def round_of_calls() -> None:
        for start, end in ends:
            tools.clean_l2()
            start.record()
            call()
            end.record()

    before_launch()
    graph = capture(round_of_calls, 1, begin)
    samples: list[float] = []
    for replay in range(REPLAYS + 1):
        before_launch()
        graph.replay()
        torch.cuda.synchronize()
        if replay:  # the first replay is a warm-up
            samples += [start.elapsed_time(end) * 1000 for start, end in ends]
    return timing("event pair around one call after reading twice the L2", samples, 1)


def _event() -> torch.cuda.Event:
    """An event that becomes a node of a graph and can be read after each replay."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
