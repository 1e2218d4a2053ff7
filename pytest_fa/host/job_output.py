"""What a worker prints during one job: the part of the server's log that belongs to it, bounded and printable.

A variant's `print`, its C++ code and device `printf` write to descriptors 1 and 2 of the worker, which are the log.
Such text may contain anything: undecodable bytes and control characters are shown as escapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pytest_fa.records.text import printable

MAX_OUTPUT_BYTES = 2**16  # of the output of one job that are kept, and as many characters of all jobs of a test
RECORD_CHARACTERS = 4000  # of the output of a failed test that its record keeps
SLICE_SECONDS = 1.0  # the size of the output is looked at this often
LIVE_SLICE_SECONDS = 0.1  # new output is shown this often
Live = Callable[[str], object]


class JobOutput:
    """The output of one job: the bytes of a log from the moment at which this is made.

    With `live`, every complete line is also passed on soon after it was written.
    """

    def __init__(self, log: int, live: Live | None = None) -> None:
        self._log, self._live = log, live
        self._start = self._shown = os.fstat(log).st_size

    @property
    def slice_seconds(self) -> float:
        """After how many seconds a client that waits looks at the output again."""
        return LIVE_SLICE_SECONDS if self._live else SLICE_SECONDS

    def show_new(self, *, is_last: bool = False) -> None:
        """Pass the lines that are new to `live`; at the end of the job also an incomplete one."""
        if self._live is None:
            return
        self._shown = min(self._shown, os.fstat(self._log).st_size)  # a variant may have truncated it
        data, skipped = _last_bytes(self._log, self._shown)
        complete = len(data) if is_last else data.rfind(b"\n") + 1
        if complete:
            self._shown += skipped + complete
            self._live(_text(data[:complete], skipped))

    def text(self) -> str:
        """The output so far: at most its last 64 KiB, and how many bytes were left out before them."""
        return _text(*_last_bytes(self._log, self._start))


class OutputTail:
    """The end of the outputs of several jobs: at most 64 Ki characters."""

    def __init__(self) -> None:
        self._text, self._left_out = "", 0

    def add(self, text: str) -> None:
        """Append the output of a job."""
        joined = self._text + (f"{text}\n" if text and not text.endswith("\n") else text)
        excess = max(0, len(joined) - MAX_OUTPUT_BYTES)
        self._text, self._left_out = joined[excess:], self._left_out + excess

    @property
    def text(self) -> str:
        """The text so far; the first line says how much of it was left out, if any was."""
        text, count = self._text, self._left_out
        if not count:
            return text
        cut, newline, kept = text.partition("\n")
        text, count = (kept, count + len(cut) + 1) if newline and kept else (text, count)
        return f"{_left_out(count, 'characters')}\n{text}"

    def take(self) -> str:
        """Return the text and forget it."""
        text = self.text
        self._text, self._left_out = "", 0
        return text


def _last_bytes(log: int, start: int) -> tuple[bytes, int]:
    """The last bytes of the log since `start`, and how many before them are left out.  A cut is made after a newline.

    If the log is shorter than `start`, a variant has truncated it, and all that is in it is returned.
    """
    size = os.fstat(log).st_size
    start = start if start <= size else 0
    skipped = max(0, size - start - MAX_OUTPUT_BYTES)
    data = os.pread(log, MAX_OUTPUT_BYTES, start + skipped)
    if skipped and 0 <= (newline := data.find(b"\n")) < len(data) - 1:
        skipped, data = skipped + newline + 1, data[newline + 1 :]
    return data, skipped


def _text(data: bytes, skipped: int) -> str:
    text = printable(data.replace(b"\r\n", b"\n").decode(errors="backslashreplace"))
    return f"{_left_out(skipped, 'bytes')}\n{text}" if skipped else text


def _left_out(count: int, unit: str) -> str:
    return f"({count} {unit} of output before this line are left out)"
