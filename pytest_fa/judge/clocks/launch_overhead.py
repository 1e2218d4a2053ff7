"""`launch_overhead_us`: the period of empty kernels with the launch geometry of a call, a lower bound of its period."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from pytest_fa.gpu.device_tools import DeviceTools
from pytest_fa.gpu.graphs import capture, event_us
from pytest_fa.records.timing import LaunchedKernel

EMPTY_US = 1.0  # about what an empty kernel takes
GRAPH_US = 1000.0  # the intended length of the shorter graph: longer than the host takes to launch it
CALLS = (10, 500)  # in the shorter graph: the fewest, and the most
SAMPLES = 5


def launch_overhead_us(
    tools: DeviceTools, launches: Iterable[LaunchedKernel], before_launch: Callable[[], object]
) -> float:
    """Measure the period, in microseconds, of calls whose kernels are replaced by empty ones of the same geometry."""
    kernels = tuple(launches)
    calls = calls_of_graph(EMPTY_US * sum(each.count for each in kernels))
    return period_of_spin_us(lambda: tools.spin_like(kernels, 0), calls, before_launch)


def calls_of_graph(call_us: float) -> int:
    """How many calls that take about `call_us` the shorter graph has."""
    fewest, most = CALLS
    return max(fewest, min(most, math.ceil(GRAPH_US / max(EMPTY_US, call_us))))


def period_of_spin_us(spin: Callable[[], object], calls: int, before_launch: Callable[[], object]) -> float:
    """Measure the period, in microseconds, of `spin`, as a slope between graphs of N and 3N calls.

    N is `calls`.  `before_launch` is called before each measurement.  Each graph counts with its least time, because a
    delay makes a run longer, never shorter.  A delay of the shorter graph would make a slope of single runs too small.
    """
    once, thrice = (capture(spin, calls * times) for times in (1, 3))
    once_us: list[float] = []
    thrice_us: list[float] = []
    for _ in range(SAMPLES):
        before_launch()
        for graph, samples_us in ((once, once_us), (thrice, thrice_us)):
            once.replay()  # while the GPU is busy with it, the host launches the graph that is timed
            samples_us.append(event_us(graph.replay))
    return (min(thrice_us) - min(once_us)) / (2 * calls)
