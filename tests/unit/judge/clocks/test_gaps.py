"""A timed run in which the judge was stopped, or lost its processor, does not count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pytest_fa.errors import StoppedJudge
from pytest_fa.judge.clocks import gaps, timed_series
from pytest_fa.judge.clocks.gaps import MAX_LOST, Gaps
from pytest_fa.judge.clocks.timed_series import TimedSeries
from tests.unit.judge.clocks.test_timed_series import fresh_data

COUNTS = """
import sys
from pytest_fa.judge.clocks.gaps import count_stops, stops
count_stops()
print("ready", flush=True)
while sys.stdin.readline():
    print(stops(), flush=True)
"""


def test_a_process_notices_that_it_was_stopped() -> None:
    """It is stopped by SIGSTOP, which no process can ignore, while it waits for a message; then it counts the stop."""
    with subprocess.Popen(
        [sys.executable, "-c", COUNTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for expected in (1, 2):
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            os.kill(process.pid, signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)
            process.stdin.write("\n")
            assert process.stdout.readline() == f"{expected}\n"
        process.stdin.write("\n")
        assert process.stdout.readline() == "2\n"


def test_a_stopped_run_is_repeated_and_the_third_ends_the_job() -> None:
    """A single stop may come from outside; three of them do not happen by accident."""
    seen = Gaps()
    assert [seen.is_gap(stops, 10.0, 10.0) for stops in (0, 1, 0, 2)] == [False, True, False, True]
    assert seen.runs == 2
    with pytest.raises(StoppedJudge, match="was stopped, or sent SIGCONT, in 3 timed runs"):
        seen.is_gap(1, 10.0, 10.0)


def test_a_lost_processor_repeats_a_run_but_not_for_ever() -> None:
    """A publication that takes much longer than usual has a gap; on a machine that is always busy, it counts."""
    seen = Gaps()
    assert not seen.is_gap(0, 20_000.0, 100.0)
    assert [seen.is_gap(0, 20_400.0, 100.0) for _ in range(MAX_LOST + 2)] == [True] * MAX_LOST + [False] * 2
    assert seen.runs == MAX_LOST


def test_the_time_of_a_run_with_a_gap_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The series runs again, on other data."""
    data = fresh_data()
    series = TimedSeries(data, "calls", 3, graph=False)
    counts = iter((0, 1, 1, 1))  # before and after two runs
    monkeypatch.setattr(timed_series, "stops", lambda: next(counts))
    published: list[bool] = []
    publish = data.publish

    def publish_again() -> None:
        published.append(True)
        publish()

    monkeypatch.setattr(data, "publish", publish_again)
    series.time()
    assert (len(published), data.gaps.runs) == (2, 1)
    assert next(counts, None) is None


def test_the_signal_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stops` is the number of calls of the handler."""
    monkeypatch.setattr(gaps, "_seen", 0)
    gaps._count(signal.SIGCONT, None)
    assert gaps.stops() == 1
