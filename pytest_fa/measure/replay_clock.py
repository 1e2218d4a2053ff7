"""A clock that moves only when told to: our samples into pytest-benchmark, through its public interface.  No torch.

`timer=` of its benchmark mark takes the clock, `benchmark.pedantic` plays the samples back; its table, saving,
comparison and histogram then work as its users know them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ReplayClock:
    """Seconds that pass when `advance` is called."""

    __name__ = "device_us"  # what pytest-benchmark shows as its timer

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


def replay(clock: ReplayClock, benchmark: Any, samples_us: Iterable[float]) -> None:  # noqa: ANN401  # a fixture
    """Give samples, in microseconds, to a `benchmark` fixture whose timer is `clock`."""
    samples = list(samples_us)
    rest = iter(samples)  # --benchmark-cprofile calls once more than there are rounds
    benchmark.pedantic(lambda: clock.advance(next(rest, 0.0) / 1e6), rounds=len(samples), iterations=1, warmup_rounds=0)
