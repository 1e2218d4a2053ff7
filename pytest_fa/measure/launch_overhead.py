"""`launch_overhead_us`: the period of empty kernels in a call's own geometry, under which no work of theirs can bring it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_fa.measure.device_time import capture, event_us
from pytest_fa.records.timing import LaunchedKernel
from pytest_fa.run.device_tools import DeviceTools

CALLS = 50
REPLAYS = 5
SAMPLES = 3


def launch_overhead_us(tools: DeviceTools, launches: Iterable[LaunchedKernel], watch: Callable[[], object]) -> float:
    """Microseconds from one empty call to the next, by the slope between graphs."""
    kernels = tuple(launches)
    return period_of_spin_us(lambda: tools.spin_like(kernels, 0), CALLS, watch)


def period_of_spin_us(spin: Callable[[], object], calls: int, watch: Callable[[], object]) -> float:
    """The same for calls that wait: the least of three slopes."""
    once, thrice = (capture(spin, calls * times) for times in (1, 3))
    slopes = []
    for _ in range(SAMPLES):
        watch()
        once.replay()
        slopes.append((event_us(thrice.replay, REPLAYS) - event_us(once.replay, REPLAYS)) / (2 * calls * REPLAYS))
    return min(slopes)
