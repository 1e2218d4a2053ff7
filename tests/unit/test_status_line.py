"""The status line: when it is shown, what it estimates, and that it leaves the cursor where it was."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fa.host.awaited import Awaited
from pytest_fa.plugin.status_line import ERASE, StatusLine


class Screen:
    """A terminal that keeps what was written; the cursor is in this column of a line of 40."""

    def __init__(self, column: int = 0) -> None:
        self.file = io.StringIO()
        self._tw = SimpleNamespace(_file=self.file, width_of_current_line=column, fullwidth=40, flush=lambda: None)

    @property
    def written(self) -> str:
        """Everything that was written so far."""
        return self.file.getvalue()


def line_at(seconds: list[float], terminal: Any = None) -> StatusLine:
    """A status line whose clock shows these seconds in turn, first at its construction and at its beginning."""
    reporter: Any = terminal or Screen()
    return StatusLine(reporter, now=iter([0.0, 0.0, *seconds]).__next__)


def begun(seconds: list[float], tests: dict[str, str], done: dict[str, float], terminal: Any = None) -> StatusLine:
    """A status line of these tests (function by node id), of which `done` have taken so many seconds."""
    line = line_at(seconds, terminal)
    line.begin(tests)
    for nodeid, duration in done.items():
        line.count(nodeid, duration)
        line.end_test(nodeid)
    return line


FOUR = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}


@pytest.mark.parametrize(
    ("elapsed", "done", "text"),
    [
        (4.9, {"a1": 4.0}, ""),
        (5.0, {}, ""),
        (6.0, {"a1": 6.0}, "fa: 1 of 4 tests, about 18 s left"),
        (8.0, {"a1": 6.0, "b1": 2.0}, "fa: 2 of 4 tests, about 8 s left"),
        (8.0, {"a1": 0.0, "b1": 0.0}, "fa: 2 of 4 tests, about 1 s left"),
        (400.0, {"a1": 400.0}, "fa: 1 of 4 tests, about 20 min left"),
        (9.0, dict.fromkeys(FOUR, 1.0), ""),
    ],
)
def test_the_text(elapsed: float, done: dict[str, float], text: str) -> None:
    """After 5 s the line estimates what is left: by the mean of each test function, or of all tests."""
    assert begun([elapsed], FOUR, done).text == text


def test_the_cursor_stays() -> None:
    """The line is written below the current one, and the cursor returns to its column."""
    screen = Screen(column=12)
    line = begun([6.0], FOUR, {"a1": 6.0}, screen)
    line.draw()
    assert screen.written == "\n\x1b[2Kfa: 1 of 4 tests, about 18 s left\x1b[A\r\x1b[12C"


def test_it_is_erased_once() -> None:
    """The line is erased only if it is shown."""
    screen = Screen()
    line = begun([6.0], FOUR, {"a1": 6.0}, screen)
    line.clear()
    assert screen.written == ""
    line.draw()
    shown = screen.written
    line.clear()
    line.clear()
    assert screen.written == f"{shown}\n\x1b[2K\x1b[A\r"


def test_it_does_not_wrap() -> None:
    """The line is shorter than the terminal is wide."""
    screen = Screen()
    begun([1e9], {str(index): "a" for index in range(10**5)}, {"0": 1e8}, screen).draw()
    text = screen.written.removeprefix("\n\x1b[2K").removesuffix("\x1b[A\r")
    assert (text[:3], len(text) < 40) == ("fa:", True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.9, ""),
        (12.3, "fa: waiting for loop (launch) for 12 s, a hang after 305 s; 0 of 4 tests"),
    ],
)
def test_a_long_wait_is_named(seconds: float, text: str) -> None:
    """A kernel that reports no progress for 5 s is named with its stage and its limit, also in the first test."""
    line = begun([20.0], FOUR, {})
    line.note_wait(Awaited("loop", "launch", seconds, 305.0))
    assert line.text == text


def test_a_wait_that_ends_is_erased() -> None:
    """As soon as the kernel answers, the line no longer names it."""
    terminal = Screen()
    line = begun([20.0, 21.0], FOUR, {}, terminal)
    assert line.note_wait(Awaited("loop", "launch", 6.0, 305.0))
    line.draw()
    assert line.note_wait(None)
    line.draw()
    assert terminal.written.endswith(f"{ERASE}\x1b[A\r")
