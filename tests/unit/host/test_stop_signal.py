"""The wait for a signal of another thread."""

from __future__ import annotations

import os
import select

import pytest

from pytest_fa.host.stop_signal import StopSignal


def test_a_wait_ends_at_its_limit() -> None:
    """A wait with a limit says whether the signal was set; an interrupted `set` is taken back without an error."""
    stop = StopSignal()
    assert not stop.wait(0.01)
    stop.set()
    assert stop.wait(0.01)
    os.eventfd_read(stop.fileno())  # as if `set` had been interrupted before it wrote
    stop.clear()
    assert not stop.is_set
    stop.close()


def test_a_wait_never_blocks_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGINT just before a call that blocks does not end the call, so each has a deadline of at most a second."""
    stop, timeouts_ms = StopSignal(), []

    class Poll:
        def register(self, *_: object) -> None:
            pass

        def poll(self, timeout_ms: float | None = None) -> None:
            timeouts_ms.append(timeout_ms)
            if len(timeouts_ms) == 3:
                stop.set()

    monkeypatch.setattr(select, "poll", Poll)
    stop.wait()
    stop.close()
    assert len(timeouts_ms) == 3
    assert all(timeout is not None and 0 < timeout <= 1000 for timeout in timeouts_ms)
