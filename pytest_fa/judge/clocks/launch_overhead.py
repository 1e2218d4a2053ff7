"""`launch_overhead_us`: the period of empty kernels with the launch geometry of a call, a lower bound of its period."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_fa.gpu.device_tools import DeviceTools
from pytest_fa.gpu.graphs import capture, event_us
from pytest_fa.records.timing import LaunchedKernel

CALLS = 50
REPLAYS = 5
SAMPLES = 3


def launch_overhead_us(
    tools: DeviceTools, launches: Iterable[LaunchedKernel], before_launch: Callable[[], object]
) -> float:
    """Measure the period, in microseconds, of calls whose kernels are replaced by empty ones of the same geometry."""
    kernels = tuple(launches)
    return period_of_spin_us(lambda: tools.spin_like(kernels, 0), CALLS, before_launch)


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
        once.replay()
        once_us.append(event_us(once.replay, REPLAYS))
        thrice_us.append(event_us(thrice.replay, REPLAYS))
    return (min(thrice_us) - min(once_us)) / (2 * calls * REPLAYS)
