"""Measures where the seconds of a run go, and writes them beside its records."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fa.records.costs import RunSeconds

COMPANION, OTHER = "baseline", "other"


def seconds_since_process_start() -> float:
    """How long this process exists, to a hundredth of a second."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5): clock ticks after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class RunClock:
    """Counts the seconds of tests by their reports.  Times of day are those of pytest's reports."""

    def __init__(self) -> None:
        self._process_start = time.time() - seconds_since_process_start()
        self._session_start = self._first_start = self._last_stop = self._answer = 0.0
        self._fixture_seconds = self._excluded_seconds = 0.0
        self._counts: Counter[str] = Counter()
        self._call_seconds: defaultdict[str, float] = defaultdict(float)

    def start_session(self) -> None:
        """Take note that collection begins."""
        self._session_start = time.time()

    def count(self, report: Any) -> None:  # noqa: ANN401  # a report with or without the attributes of `attach`
        """Add one phase of a test."""
        self._first_start = min(self._first_start or report.start, report.start)
        self._last_stop = max(self._last_stop, report.stop)
        if report.when != "call":
            self._fixture_seconds += report.duration
            return
        record = getattr(report, "fa_record", None)
        kind = OTHER if record is None else COMPANION if report.fa_companion else record["kind"]
        self._counts[kind] += 1
        self._call_seconds[kind] += report.duration

    def note_answer(self) -> None:
        """Take note that the last line was written."""
        self._answer = time.time()

    def exclude(self, seconds: float) -> None:
        """Leave out a time in which the run waited for its user."""
        self._excluded_seconds += seconds

    def seconds(self, build_seconds: float, workers: int) -> RunSeconds:
        """The seconds of the run until now."""
        from pytest_fa.records.costs import RUN_SCHEMA, KindSeconds, RunSeconds  # noqa: PLC0415  # only with records

        now = time.time() - self._excluded_seconds
        return RunSeconds(
            schema=RUN_SCHEMA,
            total_seconds=max(0.0, now - self._process_start),
            start_seconds=max(0.0, self._session_start - self._process_start),
            collection_seconds=max(0.0, self._first_start - self._session_start),
            fixture_seconds=self._fixture_seconds,
            build_seconds=build_seconds,
            answer_seconds=max(0.0, self._answer - self._last_stop) if self._answer else 0.0,
            end_seconds=max(0.0, now - (self._answer or self._last_stop)),
            tests={kind: KindSeconds(count, self._call_seconds[kind]) for kind, count in self._counts.items()},
            workers=workers,
        )

    def write(self, record_file: Path, build_seconds: float, workers: int) -> None:
        """Write the seconds beside the records of the run; a run without records has none."""
        from pytest_fa.records.costs import write_run_seconds  # noqa: PLC0415  # only with records

        if record_file.is_file():
            with contextlib.suppress(OSError):  # the run itself is not affected
                write_run_seconds(record_file, self.seconds(build_seconds, workers))
