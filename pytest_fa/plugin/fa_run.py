"""`FaRun`, which the tests of the shipped suite call.  Each method runs one kind of test and records the result."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_fa.errors import LockProblem
from pytest_fa.host.client import WorkerError
from pytest_fa.options.command_line import SUITE_FOLDER
from pytest_fa.plugin.other_plugins import other_plugins
from pytest_fa.plugin.own_process import protect_process
from pytest_fa.plugin.state import (
    ALREADY_REPORTED_KEY,
    OUTPUT_KEY,
    RECORD_KEY,
    REFUSED_KEY,
    first_reports_of,
    live_output,
    session_of,
    status_of_wait,
)
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.text import printable
from pytest_fa.session.machine_problem import machine_problem, start_problem, torch_problem
from pytest_fa.session.refusals import AlreadyReported, CannotRun, ChangedMeanwhile, NotJudged, Refused
from pytest_fa.table.failure import failure_text

if TYPE_CHECKING:
    from pytest_fa.catalog.case import Case
    from pytest_fa.catalog.variant import BrokenVariant, Variant
    from pytest_fa.records.record import Record


class FaRun:
    """Runs the work of one test in the builder, a worker process or a tool, and makes its record.

    Each method returns the record if its outcome is ok.  Otherwise it fails the test, or skips it if this machine or
    the variant cannot run it.
    """

    def __init__(self, node: pytest.Item) -> None:
        protect_process(node.config)
        self.node = node
        self.session = session_of(node.config)
        self.first_reports = first_reports_of(node.config)
        self._live = live_output(node.config)
        self.session.runner.show_live(self._live)
        self.session.runner.show_wait(status_of_wait(node.config))
        self.session.asked_by(other_plugins(node.config), own_test_id(node))

    def build(self, variant: Variant | BrokenVariant) -> Record:
        """Check the variant's build.  Fails with the compiler's messages, or with the limits that are exceeded."""
        return self.finish(functools.partial(self.first_reports.build, self.node.nodeid, variant))

    def correct(self, variant: Variant, case: Case) -> Record:
        """Run the variant on the case and judge its output.  Fails with every bound."""
        return self.finish(functools.partial(self.first_reports.run, self.node.nodeid, variant, case, "correct"))

    def property(self, variant: Variant, name: str) -> Record:
        """Check one property of the variant.  Fails with the part that does not hold."""
        return self.finish(functools.partial(self.first_reports.check_property, self.node.nodeid, variant, name))

    def speed(self, variant: Variant, case: Case) -> Record:
        """Run the variant on the case, judge its output, time it, and judge the outputs of the timed calls."""
        return self.finish(functools.partial(self.first_reports.run, self.node.nodeid, variant, case, "speed"))

    def __getattr__(self, name: str) -> Callable[..., Record]:
        """A method that a feature adds."""
        if name.startswith("_") or name == "node":  # a copy asks before it has any attribute
            raise AttributeError(name)
        of_features = self.node.config.hook.pytest_fa_run_methods()
        methods = {name: method for each in of_features for name, method in each.items()}
        if name not in methods:
            names = ", ".join(("build", "correct", "property", "speed", *methods))
            raise AttributeError(f"fa_run has no {name!r} (it has: {names})")
        return functools.partial(methods[name], self)

    def finish(self, work: Callable[[], Record], *, skips_unmeasured: bool = True) -> Record:
        """Do the work, and keep its record and what the worker printed for the report.

        Fails or skips the test by the record's outcome.  Skips it, too, if it cannot run here, or if another test
        reports its fault.  Without `skips_unmeasured`, a record without a measurement fails the test.
        """
        record = obstacle = None  # pytest.fail inside `except` would show both exceptions
        try:
            record = work()
        except (AlreadyReported, CannotRun, LockProblem) as problem:
            obstacle = problem
        except WorkerError as problem:
            obstacle = self._not_started(str(problem))
        finally:
            self.take_output()
        options = self.session.options
        if record and (reason := machine_problem(record, (options.artifacts, options.cache, options.rootdir))):
            record, obstacle = None, NotJudged(reason)
        if record is None:
            self.end_without_verdict(obstacle)
        self.node.stash[RECORD_KEY] = record
        if record.outcome == Outcome.NOT_MEASURED and skips_unmeasured:
            pytest.skip(record.message)
        if record.outcome != Outcome.OK:
            details = [line for lines in self.node.config.hook.pytest_fa_details(record=record) for line in lines]
            pytest.fail(failure_text(record, details), pytrace=False)
        return record

    def _not_started(self, text: str) -> NotJudged | AlreadyReported:
        """Why no worker process starts.  Another test may have said already that torch cannot be imported."""
        if torch_problem(text):
            try:
                self.first_reports.note_no_torch(self.node.nodeid)
            except AlreadyReported as reported:
                return reported
        return NotJudged(start_problem(text))

    def end_without_verdict(self, obstacle: Exception | None) -> NoReturn:
        """Skip the test, or fail it if the obstacle must not be there."""
        reason = printable(str(obstacle))
        self.node.stash[REFUSED_KEY] = isinstance(obstacle, Refused)
        if isinstance(obstacle, AlreadyReported):
            self.node.stash[ALREADY_REPORTED_KEY] = True
            if obstacle.record is not None:
                self.node.stash[RECORD_KEY] = obstacle.record
        elif isinstance(obstacle, LockProblem | ChangedMeanwhile | NotJudged):
            pytest.fail(reason, pytrace=False)
        elif self.session.options.require_gpu and not isinstance(obstacle, Refused):
            pytest.fail(f"{reason} (--fa-require-gpu)", pytrace=False)
        pytest.skip(reason)

    def take_output(self) -> None:
        """Let what the workers printed during this test become a section of the report unless it was shown live."""
        output = self.session.runner.take_output()
        if output and self._live is None:
            self.node.stash[OUTPUT_KEY] = output


def own_test_id(node: pytest.Item) -> str:
    """The id of a user's own test, with the path from where pytest was started; empty for one of the shipped suite."""
    if node.path.parent.resolve() == SUITE_FOLDER.resolve():
        return ""
    path = os.path.relpath(node.path, node.config.invocation_params.dir)
    return f"{path}::{node.nodeid.partition('::')[2]}"
