"""`cold_us`: one call after the cache was cleaned.

In one graph, again and again: read twice the L2's size, which leaves clean lines of no use to anyone and nothing to
write back; event; call; event.  What two events cost is in it, so an empty kernel's figure stands beside it.
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
LONG_CALL_US = 5000.0  # of these a few will do


def cold_time(
    call: Callable[[], object],
    begin: Callable[[], object],
    tools: DeviceTools,
    estimate_us: float,
    watch: Callable[[], object] = lambda: None,
) -> Timing:
    """Samples of single calls, each from a clean cache.  Raises `CannotCapture`."""
    count = CALLS if estimate_us < LONG_CALL_US else 1
    ends = [(_event(), _event()) for _ in range(count)]

    def round_of_calls() -> None:
        for start, end in ends:
            tools.clean_l2()
            start.record()
            call()
            end.record()

    watch()
    graph = capture(round_of_calls, 1, begin)
    samples: list[float] = []
    for replay in range(REPLAYS + 1):
        watch()
        graph.replay()
        torch.cuda.synchronize()
        if replay:  # the first one warms up
            samples += [start.elapsed_time(end) * 1000 for start, end in ends]
    return timing("event pair around one call after reading twice the L2", samples, 1)


def _event() -> torch.cuda.Event:
    """An event that becomes a node of a graph and tells its time after each replay."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
