"""A clock that advances only on request: it passes samples to pytest-benchmark through its public interface.  No torch.

The clock is the `timer=` of pytest-benchmark's mark, and `benchmark.pedantic` replays the samples on it.  Its table,
saving, comparison and histogram then work as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ReplayClock:
    """A clock in seconds that only `advance` moves."""

    __name__ = "device_us"  # pytest-benchmark shows this as the timer's name

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The clock's time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds


def replay(clock: ReplayClock, benchmark: Any, samples_us: Iterable[float]) -> None:  # noqa: ANN401  # a fixture
    """Pass samples, in microseconds, to a `benchmark` fixture whose timer is `clock`."""
    samples = list(samples_us)
    remaining = iter(samples)  # --benchmark-cprofile makes one call more than there are rounds
    benchmark.pedantic(
        lambda: clock.advance(next(remaining, 0.0) / 1e6), rounds=len(samples), iterations=1, warmup_rounds=0
    )
