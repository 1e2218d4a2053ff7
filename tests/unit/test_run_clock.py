"""Where the seconds of a run go, by the reports of its tests."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fa.plugin.run_clock import RunClock, seconds_since_process_start
from pytest_fa.records.costs import KindSeconds


def report(when: str, start: float, duration: float, **attributes: Any) -> SimpleNamespace:
    """A phase of a test."""
    return SimpleNamespace(when=when, start=start, stop=start + duration, duration=duration, **attributes)


def test_the_seconds_of_a_run() -> None:
    """Calls are counted by the kind of their records, setup and teardown as fixtures; a wait is left out."""
    clock = RunClock()
    clock.start_session()
    start = time.time() + 1.0
    candidate = {"fa_record": {"kind": "speed"}, "fa_companion": False}
    for each in (
        report("setup", start, 0.5),
        report("call", start + 0.5, 2.0, **candidate),
        report("teardown", start + 2.5, 0.25),
        report("call", start + 3.0, 1.0, **(candidate | {"fa_companion": True})),
        report("call", start + 4.0, 0.125),
    ):
        clock.count(each)
    seconds = clock.seconds(build_seconds=0.5, workers=0)
    assert seconds.tests == {
        "speed": KindSeconds(1, 2.0),
        "baseline": KindSeconds(1, 1.0),
        "other": KindSeconds(1, 0.125),
    }
    assert (seconds.fixture_seconds, seconds.build_seconds) == (0.75, 0.5)
    assert seconds.collection_seconds == pytest.approx(1.0, abs=0.5)
    total = clock.seconds(0.5, 0).total_seconds
    clock.exclude(total / 2)
    assert clock.seconds(0.5, 0).total_seconds == pytest.approx(total / 2, rel=0.1)


def test_the_end_begins_with_the_answer() -> None:
    """What is written below the last test belongs to the answer, and only the time after it to the end."""
    clock = RunClock()
    clock.start_session()
    clock.count(report("call", time.time() - 10.0, 1.0))
    clock.note_answer()
    seconds = clock.seconds(0.0, 0)
    assert seconds.answer_seconds == pytest.approx(9.0, abs=1.0)
    assert seconds.end_seconds == pytest.approx(0.0, abs=1.0)


def test_the_age_of_this_process() -> None:
    """The time since the start of the process grows with the clock."""
    before = seconds_since_process_start()
    time.sleep(0.05)
    assert 0.03 <= seconds_since_process_start() - before < 30
