"""Where `--fa-watch` writes, and the clock that starts at a save."""

from __future__ import annotations

import time
from collections.abc import Callable

from pytest_fa.records.text import printable

Write = Callable[..., object]  # a line, and `red=` or `green=` for the whole of it


class Screen:
    """Writes lines."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._start = time.monotonic()

    def start_clock(self, seconds_ago: float) -> None:
        """A file was saved this many seconds ago."""
        self._start = time.monotonic() - seconds_ago

    @property
    def after_save(self) -> str:
        """The time since the save, in words."""
        return f"{time.monotonic() - self._start:.1f} s after the save"

    def title(self, text: str, *, good: bool | None = None) -> None:
        """Write a line about the run; in green or red if it is a verdict."""
        self._lines(f"fa: {text}", good=good)

    def detail(self, text: str, *, good: bool | None = None) -> None:
        """Write a line about one variant."""
        self._lines(f"  {text}", good=good)

    def failure(self, title: str, text: str, output: str) -> None:
        """Write a failure in full, with what the worker printed."""
        self._lines(f"-- {title} --", good=False)
        self._lines(text)
        if output:
            self._lines(f"  the worker printed:\n{output}")

    def _lines(self, text: str, *, good: bool | None = None) -> None:
        for line in text.splitlines():
            self._write(printable(line), red=good is False, green=good is True)
