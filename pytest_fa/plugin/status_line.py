"""The line below pytest's own progress: how many tests are done, how long the others will take, what is awaited.

It is shown on a terminal only, in a run that takes more than 5 s, and it is erased before pytest writes anything else.
A kernel that reports no progress for 5 s is named, with the stage and the time after which it is ended as a hang.
A log file therefore never contains it.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from pytest_fa.host.awaited import Awaited

SHOWN_AFTER_SECONDS = 5.0
ERASE = "\n\x1b[2K"  # go to the next line and erase it


class StatusLine:
    """The status line of one run; `begin` starts its clock.  `now` is a clock in seconds."""

    def __init__(self, terminal: pytest.TerminalReporter, now: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._now = terminal, now
        self._names: dict[str, str] = {}  # of the test functions that are still to run, by node id
        self._seconds: dict[str, float] = defaultdict(float)  # of all tests so far, by function
        self._done: Counter[str] = Counter()  # tests, by function
        self._total, self._start, self._is_drawn = 0, now(), False
        self._awaited: Awaited | None = None

    def begin(self, names: dict[str, str]) -> None:
        """Start with these tests: the name of the test function by node id."""
        self._names, self._total, self._start = dict(names), len(names), self._now()

    def count(self, nodeid: str, seconds: float) -> None:
        """Add the duration of one phase of a test."""
        if nodeid in self._names:
            self._seconds[self._names[nodeid]] += seconds

    def end_test(self, nodeid: str) -> None:
        """Count a test as done."""
        if name := self._names.pop(nodeid, None):
            self._done[name] += 1

    def note_wait(self, awaited: Awaited | None) -> bool:
        """Name what a job waits for if that takes long; return whether the line changes."""
        was_named = self._awaited is not None
        self._awaited = awaited if awaited and awaited.seconds >= SHOWN_AFTER_SECONDS else None
        return was_named or self._awaited is not None

    @property
    def text(self) -> str:
        """The line; empty in the first seconds, and, unless a kernel is awaited, before the first test is done."""
        elapsed, done = self._now() - self._start, self._total - len(self._names)
        if self._awaited and self._names:
            limit = f"a hang after {self._awaited.limit_seconds:.0f} s"
            return f"fa: waiting for {self._awaited}, {limit}; {done} of {self._total} tests"
        if elapsed < SHOWN_AFTER_SECONDS or not done or not self._names:
            return ""
        return f"fa: {done} of {self._total} tests, about {_duration(self._seconds_left(elapsed / done))} left"

    def draw(self) -> None:
        """Show the line below the current one."""
        if text := self.text:
            self._write(text[: self._terminal._tw.fullwidth - 1])  # noqa: SLF001
            self._is_drawn = True
        else:
            self.clear()

    def clear(self) -> None:
        """Erase the line if it is shown."""
        if self._is_drawn:
            self._write("")
            self._is_drawn = False

    def _write(self, text: str) -> None:
        """Write a text on the next line and return the cursor to where it is."""
        writer = self._terminal._tw  # noqa: SLF001  # past its count of the columns of the current line
        column = writer.width_of_current_line
        back = f"\x1b[A\r\x1b[{column}C" if column else "\x1b[A\r"
        writer._file.write(f"{ERASE}{text}{back}")  # noqa: SLF001
        writer.flush()

    def _seconds_left(self, mean_seconds: float) -> float:
        """The sum over the tests that are left: the mean of their function, or of all tests if none of it is done."""
        means = {name: self._seconds[name] / count for name, count in self._done.items()}
        return sum(means.get(name, mean_seconds) for name in self._names.values())


def may_show(config: pytest.Config) -> bool:
    """Whether the status line may be shown.

    It needs a terminal that understands escape sequences and to which nothing else writes: no -q, -s, live log,
    debugger or pytest-xdist.
    """
    terminal = config.pluginmanager.getplugin("terminalreporter")
    return (
        terminal is not None
        and bool(terminal.isatty())
        and os.environ.get("TERM", "dumb") != "dumb"
        and config.get_verbosity() >= 0
        and config.getoption("capture") != "no"
        and not config.getoption("usepdb")
        and not config.getini("log_cli")
        and config.getoption("log_cli_level", None) is None
        and not config.getoption("numprocesses", None)
    )


def _duration(seconds: float) -> str:
    """A rough duration: whole seconds, minutes from two minutes on."""
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{round(seconds / 60)} min"  # noqa: PLR2004
