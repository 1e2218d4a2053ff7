"""One variant after a save: its builds, its checks, then its times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import LockProblem
from pytest_fa.features.compare.compare import process_sd_of
from pytest_fa.features.watch.screen import Screen
from pytest_fa.features.watch.tasks import Task
from pytest_fa.features.watch.watch_lines import build_line, time_line, untimed_line, wrong_shape_line
from pytest_fa.records.built import Build
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.first_reports import FirstReports
from pytest_fa.session.refusals import AlreadyReported, CannotRun, Refused
from pytest_fa.session.session import Session
from pytest_fa.table.failure import failure_text


class Memory(NamedTuple):
    """What earlier runs have measured: the last time of a variant at a shape, the fastest baseline, and the builds."""

    last_time: Callable[[str, str], Record | None]
    baseline: Callable[[str], Record | None]
    builds: Callable[[str], list[Build]]


class VariantRun:
    """Runs the tests of one variant.  The first failure is shown in full, at once."""

    def __init__(self, session: Session, variant: Variant, screen: Screen, memory: Memory) -> None:
        self._session, self._variant, self._screen, self._memory = session, variant, screen, memory
        self._first_reports = FirstReports(session)
        self.records: list[Record] = []
        self.why_not_run = ""  # why this machine cannot run it
        self._has_shown_failure = False

    @property
    def is_right(self) -> bool:
        """Whether something was judged, and everything that was is right."""
        return bool(self.records) and not self.why_not_run and all(each.outcome == Outcome.OK for each in self.records)

    def run(self, tasks: list[Task]) -> None:
        """Run the tests in their order.  After a hang, or if this machine cannot run the variant, no other follows."""
        if not tasks:
            self.why_not_run = f"no selected test applies to {self._variant.name} any longer"
        self._first_reports.build_tests = frozenset(task.variant.name for task in tasks if task.test == "build")
        checks = [task for task in tasks if task.test in ("correct", "property")]
        self._build([task for task in tasks if task.test == "build"])
        if self._check(checks):
            self._time([task for task in tasks if task.test == "speed"])
        if self.why_not_run:
            self._screen.detail(f"not run: {self.why_not_run}")

    def _build(self, tasks: list[Task]) -> None:
        for record in filter(None, map(self._record, tasks)):
            if record.outcome == Outcome.OK:
                before = self._memory.builds(record.variant)
                is_cached = not self._session.builds.report.compiled
                self._screen.detail(build_line(record.variant, record.builds, before, is_cached=is_cached))

    def _check(self, tasks: list[Task]) -> bool:
        """Judge the first case, say so, then judge the others.  Returns whether the variant can be timed."""
        name, judged = self._variant.name, []
        for task in tasks:
            record = self._record(task)
            if self.why_not_run:
                return False
            if record is None:
                continue
            judged.append(record)
            is_right = record.outcome == Outcome.OK
            if len(judged) == 1 and len(tasks) > 1:
                verdict = "correct" if is_right else record.outcome
                self._screen.detail(f"{name}: first case {verdict}, {self._screen.after_save}", good=is_right)
            if record.outcome == Outcome.HUNG:
                self._screen.detail(f"{name}: the rest is not run, because each call might hang", good=False)
                return False
        self._say_checks(judged)
        return True

    def _say_checks(self, judged: list[Record]) -> None:
        """How many checks were right, and each shape at which one was not."""
        if not judged:
            return
        right = sum(record.outcome == Outcome.OK for record in judged)
        text = f"{self._variant.name}: {right} of {len(judged)} checks passed, {self._screen.after_save}"
        self._screen.detail(text, good=right == len(judged))
        for records in _by_shape(judged):
            if any(record.outcome != Outcome.OK for record in records):
                self._screen.detail(wrong_shape_line(records), good=False)

    def _time(self, tasks: list[Task]) -> None:
        options, environment = self._session.options, self._session.records.environment
        for task in tasks:
            record = self._record(task)
            if record is None or not isinstance(task.part, Case):
                continue
            if record.speed is None:
                self._screen.detail(untimed_line(record), good=None if record.outcome == Outcome.OK else False)
                continue
            if record.outcome != Outcome.OK:
                self._screen.detail(untimed_line(record), good=False)
                continue
            shape = task.part.shape_id
            before, baseline = self._memory.last_time(record.variant, shape), self._memory.baseline(shape)
            line = time_line(record, before, baseline, lambda _: process_sd_of(options.records_folder, environment.gpu))
            self._screen.detail(line, good=True)

    def _record(self, task: Task) -> Record | None:
        """Run one test, and keep its record.  None if another test reports its fault, or the variant refuses it."""
        try:
            record = self._result(task)
        except (AlreadyReported, Refused):
            return None
        except (CannotRun, LockProblem) as problem:
            self.why_not_run = str(problem)
            return None
        self._session.runner.take_output()
        self.records.append(record)
        if record.outcome != Outcome.OK:
            self._first_reports.note_failure(task.name)
            if not self._has_shown_failure:
                self._has_shown_failure = True
                self._screen.failure(task.name, failure_text(record), record.output)
        return record

    def _result(self, task: Task) -> Record:
        if task.test == "build":
            return self._session.build_record(task.variant)
        if isinstance(task.part, Case):
            return self._first_reports.run(task.name, task.variant, task.part, task.test)
        return self._first_reports.check_property(task.name, task.variant, task.part or "")


def _by_shape(records: Iterable[Record]) -> list[list[Record]]:
    """The records of cases, one list for each shape; properties have shapes of their own."""
    shapes: dict[str, list[Record]] = {}
    for record in records:
        if record.case is not None:
            shapes.setdefault(record.case.shape_id, []).append(record)
    return list(shapes.values())
