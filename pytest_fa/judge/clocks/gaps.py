"""Gaps in the judge's own running while it times: it was stopped by a signal, or lost its processor.

Whoever stops the judge has work done in between.  A process that goes on after a stop gets SIGCONT, whatever has
stopped it, and notices it by that.  A SIGCONT without a stop counts, too: nothing honest sends it to a judge.
"""

from __future__ import annotations

import signal

from pytest_fa.errors import StoppedJudge

MAX_STOPPED = 3  # runs with a stop of the judge
MAX_LOST = 20  # runs that are repeated because it lost its processor
LOST_TIMES, LOST_US = 3.0, 20_000.0  # a publication that takes longer than so many times as usual and this has a gap

_seen = 0


def count_stops() -> None:
    """Count the stops of this process from now on.  Only for the main thread of a process that is forked for it."""
    signal.signal(signal.SIGCONT, _count)
    signal.siginterrupt(signal.SIGCONT, False)  # system calls of C code go on


def stops() -> int:
    """How often this process was stopped since `count_stops`, and went on."""
    return _seen


def _count(*_: object) -> None:
    global _seen  # noqa: PLW0603  # of the process, as the signal is
    _seen += 1


class Gaps:
    """The runs of a job that do not count, because the judge did not run without a gap itself."""

    def __init__(self) -> None:
        self.stops = self.lost = 0

    @property
    def runs(self) -> int:
        """How many runs were repeated."""
        return self.stops + self.lost

    def is_gap(self, stops: int, published_us: float, publish_us: float) -> bool:
        """Whether the last run had a gap: so many stops, or a publication that took much longer than `publish_us`.

        A machine that is busy throughout lets the judge lose its processor in most runs.  Then they count, and so do
        their longer times.  Raises `StoppedJudge`.
        """
        if stops:
            self.stops += 1
            if self.stops >= MAX_STOPPED:
                raise StoppedJudge(
                    f"the judge's process was stopped, or sent SIGCONT, in {self.stops} timed runs, which do not "
                    f"count; end what sends it signals: the variant itself, if nothing else does"
                )
            return True
        is_lost = published_us > LOST_TIMES * publish_us + LOST_US and self.lost < MAX_LOST
        self.lost += is_lost
        return is_lost
