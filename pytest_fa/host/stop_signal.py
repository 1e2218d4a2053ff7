"""A signal from another thread that the result of the current work is no longer wanted."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time

import msgspec

from pytest_fa.wire.channel import Channel, Garbage
from pytest_fa.wire.jobs import Progress, decode_answer

SLICE_MS = 200  # of a wait without a deadline


class Abandoned(Exception):
    """The work was ended before its result was there, because the result is no longer wanted."""


class StopSignal:
    """Set by one thread, looked at and waited for by another; a descriptor becomes readable when it is set.

    Unlike `threading.Event`, it stays usable if Ctrl-C interrupts `set`: the interruption of an Event can leave its
    lock taken.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_set = False

    def fileno(self) -> int:
        """The descriptor, for `poll`."""
        return self._descriptor

    @property
    def is_set(self) -> bool:
        """Whether the signal was set since the last `clear`."""
        return self._is_set

    def set(self) -> None:
        """Set the signal."""
        with self._lock:
            if not self._is_set:
                self._is_set = True
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Take the signal back."""
        with self._lock:
            if self._is_set:
                self._is_set = False
                with contextlib.suppress(BlockingIOError):  # Ctrl-C came before `set` had written
                    os.eventfd_read(self._descriptor)

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait until the signal is set, and return whether it is.  Ctrl-C ends the wait.

        A SIGINT that comes just before `poll` blocks does not interrupt it; Python sees it after the slice.
        """
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            poll.poll(min(SLICE_MS, 1000 * left))
        return self._is_set

    def require_unset(self) -> None:
        """Raise `Abandoned` if the signal is set."""
        if self._is_set:
            raise Abandoned

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def require_unset(stop: StopSignal | None) -> None:
    """Raise `Abandoned` if there is a signal and it is set."""
    if stop is not None:
        stop.require_unset()


def is_answered(channel: Channel, seconds: float) -> bool:
    """Whether the result of an abandoned job arrives within these seconds.  It is read and dropped."""
    deadline = time.monotonic() + seconds
    try:
        while channel.wait(deadline - time.monotonic()):
            if not isinstance(decode_answer(channel.receive()), Progress):
                return True
    except (EOFError, OSError, ValueError, RecursionError, Garbage, msgspec.MsgspecError):
        return False
    return False
