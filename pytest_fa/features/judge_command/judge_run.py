"""Run the tests of one variant through the Python functions' session: what is asked, until the first failure."""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, LockProblem, ToolchainError
from pytest_fa.features.api.functions import say, start
from pytest_fa.features.api.kept_workers import close_workers, open_session
from pytest_fa.features.gate.gate import decide_gate, gate_question
from pytest_fa.features.gate.gate_lines import gate_details
from pytest_fa.features.gate.opponents import prepare_opponents
from pytest_fa.features.judge_command.conclude import RunResult
from pytest_fa.features.judge_command.kept_records import KeptRecords
from pytest_fa.features.ncu.plugin import NcuOptions
from pytest_fa.features.ncu.profile import CaseProfiler
from pytest_fa.host.fork_server import WorkerError
from pytest_fa.options.options import Options
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable
from pytest_fa.session.first_reports import FirstReports
from pytest_fa.session.machine_problem import machine_problem, start_problem
from pytest_fa.session.refusals import AlreadyReported, CannotRun, ChangedMeanwhile, NotJudged
from pytest_fa.session.session import Session
from pytest_fa.table.failure import failure_text

SUITE_FILE = "test_attention.py"  # in which the shipped suite has these tests
FAILED = Outcome.FAILED.exit_status
ENDS_RUN = (LockProblem, ChangedMeanwhile, NotJudged)


class JudgedTest(NamedTuple):
    """One test of the shipped suite: its name there, and the work that makes its record."""

    name: str
    work: Callable[[], Record]


def run_variant(options: Options, variant: Variant, ratio: float) -> tuple[RunResult, KeptRecords]:
    """Build, judge, profile and gate the variant, and end all processes.  The first failure ends the run."""
    run = _Run(options)
    try:
        with open_session(options) as session:
            _start(session, variant)
            for test in _tests(session, variant, ratio):
                if not run.passes(session, test):
                    break
    except KeyboardInterrupt:
        run.note_problem("it was interrupted")
    except FaError as problem:
        run.note_problem(str(problem))
    except Exception as problem:  # noqa: BLE001  # every way in which the command ends has a document
        say(traceback.format_exc())
        run.note_problem(f"{type(problem).__name__}: {problem}")
    finally:
        close_workers()
    return run.result(), run.kept


def _start(session: Session, variant: Variant) -> None:
    """Start the worker servers, and build the variant.  Without a compiler, each test that needs one says so."""
    session.asked_by()
    session.runner.has_timings = True  # those of the gate
    prepare_opponents(session)
    try:
        start(session, variant)
    except ToolchainError:
        return
    except (OSError, LockProblem) as problem:
        raise NotJudged(f"the build cache cannot be used: {problem}") from None


def _tests(session: Session, variant: Variant, ratio: float) -> Iterator[JudgedTest]:
    """The tests in the order of the suite.  Those of a gate come last, when everything else has passed."""
    plan, first = session.run_plan.plan, FirstReports(session)
    first.build_tests = frozenset(each.name for each in plan.builds)
    for each in plan.builds:
        name = f"test_build[{each.name}]"
        yield JudgedTest(name, functools.partial(first.build, name, each))
    for each, case in (*plan.checks, *plan.claims):
        name = f"test_correct[{each.name}-{case.id}]"
        yield JudgedTest(name, functools.partial(first.run, name, each, case, "correct"))
    for each, promise in plan.properties:
        name = f"test_property[{each.name}-{promise}]"
        yield JudgedTest(name, functools.partial(first.check_property, name, each, promise))
    if session.options.part(NcuOptions):
        profiler = CaseProfiler(session.runner)
        for each, case in plan.first_seeds:
            name = f"test_profile[{each.name}-{case.shape_id}]"
            yield JudgedTest(name, functools.partial(profiler.profile, each, case, say))
    name = f"test_gate[{variant.name}]"
    yield JudgedTest(
        name, lambda: decide_gate(session.runner, variant, gate_question(session.run_plan, variant, ratio), say)
    )


class _Run:
    """What the tests gave so far."""

    def __init__(self, options: Options) -> None:
        self._folders = (options.artifacts, options.cache, options.rootdir)
        self.kept = KeptRecords(options)
        self._not_run: Counter[str] = Counter()
        self._problem = ""
        self._exit_status = 0

    def passes(self, session: Session, test: JudgedTest) -> bool:
        """Run one test and keep its record.  Returns False if it fails, which ends the run."""
        try:
            record = self._record(session, test)
        except ENDS_RUN as problem:
            self.note_problem(f"{SUITE_FILE}::{test.name}: {printable(str(problem))}")
            return False
        except (AlreadyReported, CannotRun) as problem:
            self._skip(test, problem)
            return True
        try:
            self.kept.append(record)
        except ValueError as problem:
            self.note_problem(f"{record.id}: {problem}")
            return False
        has_passed = record.outcome in (Outcome.OK, Outcome.NOT_MEASURED)
        say(f"{test.name}: {'ok' if record.outcome == Outcome.OK else failure_text(record, gate_details(record))}")
        if not has_passed:
            self._exit_status = record.outcome.exit_status
        return has_passed

    def _skip(self, test: JudgedTest, problem: AlreadyReported | CannotRun) -> None:
        """Count a test that did not run, or keep the record that stands for it."""
        say(f"{test.name}: not run: {problem}")
        if isinstance(problem, AlreadyReported) and problem.record is not None:
            self.kept.append(problem.record)
        else:
            self._not_run[printable(str(problem))] += 1

    def note_problem(self, problem: str) -> None:
        """Keep the first problem of the run itself."""
        self._problem = self._problem or problem
        self._exit_status = FAILED

    def result(self) -> RunResult:
        """What the run gave, when all kernels have ended.  Records that are not in the file are a problem."""
        nothing_ran = bool(self._not_run) and not any(map(_has_run, self.kept.records))
        lost = self.kept.end(FAILED if nothing_ran else self._exit_status)
        return RunResult(tuple(self.kept.records), self._not_run, printable(lost or self._problem))

    def _record(self, session: Session, test: JudgedTest) -> Record:
        """The record of one test."""
        try:
            record = test.work()
        except WorkerError as problem:
            raise NotJudged(start_problem(str(problem))) from None
        finally:
            session.runner.take_output()
        if reason := machine_problem(record, self._folders):
            raise NotJudged(reason)
        return record


def _has_run(record: Record) -> bool:
    """Whether a record is that of a case that got past its build."""
    return record.kind not in ("build", "property") and record.outcome not in (Outcome.NOT_BUILT, Outcome.NOT_MEASURED)
