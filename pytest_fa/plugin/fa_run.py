"""`FaRun`, which the tests of the shipped suite call.  Each method runs one kind of test and records the result."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import msgspec
import pytest

from pytest_fa.errors import LockProblem
from pytest_fa.host.client import WorkerError
from pytest_fa.host.job_output import RECORD_CHARACTERS
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
)
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.text import printable, printable_struct
from pytest_fa.session.machine_problem import machine_problem, start_problem
from pytest_fa.session.refusals import AlreadyReported, CannotRun, ChangedMeanwhile, NotJudged, Refused
from pytest_fa.session.rerun import own_rerun_command
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
        methods = {
            name: method for each in self.node.config.hook.pytest_fa_run_methods() for name, method in each.items()
        }
        if name.startswith("_") or name not in methods:
            raise AttributeError(
                f"fa_run has no {name!r} (it has: build, correct, property, speed, {', '.join(methods)})"
            )
        return functools.partial(methods[name], self)

    def _with_own_command(self, record: Record) -> Record:
        """The record; for a user's own test, with a rerun command that names this test and not one of the suite."""
        if self.node.path.parent.resolve() == SUITE_FOLDER.resolve():
            return record
        path = os.path.relpath(self.node.path, self.node.config.invocation_params.dir)
        test_id = f"{path}::{self.node.nodeid.partition('::')[2]}"
        command = own_rerun_command(self.session.options, record, test_id)
        return msgspec.structs.replace(record, rerun_command=command)

    def _with_plugins(self, record: Record) -> Record:
        """The record with the names of the plugins that could have changed this run."""
        return msgspec.structs.replace(record, other_plugins=other_plugins(self.node.config))

    def finish(self, work: Callable[[], Record], *, skips_unmeasured: bool = True) -> Record:
        """Do the work, and keep its record and what the worker printed for the report.

        Fails or skips the test by the record's outcome.  Skips it, too, if it cannot run here, or if another test
        reports its fault.  Without `skips_unmeasured`, a record without a measurement fails the test.
        """
        record = obstacle = None  # pytest.fail inside `except` would show both exceptions
        try:
            record = printable_struct(
                self._with_plugins(self._with_own_command(work()))
            )  # a kernel's words may be in it
        except (AlreadyReported, CannotRun, LockProblem) as problem:
            obstacle = problem
        except WorkerError as problem:
            obstacle = NotJudged(start_problem(str(problem)))
        finally:
            output = self.take_output()
        options = self.session.options
        if record and (reason := machine_problem(record, (options.artifacts, options.cache, options.rootdir))):
            record, obstacle = None, NotJudged(reason)
        if record is None:
            self.end_without_verdict(obstacle)
        self.node.stash[RECORD_KEY] = record = with_output(record, output)
        if record.outcome == Outcome.NOT_MEASURED and skips_unmeasured:
            pytest.skip(record.message)
        if record.outcome != Outcome.OK:
            details = [line for lines in self.node.config.hook.pytest_fa_details(record=record) for line in lines]
            pytest.fail(failure_text(record, details), pytrace=False)
        return record

    def end_without_verdict(self, obstacle: Exception | None) -> NoReturn:
        """Skip the test, or fail it if the obstacle must not be there."""
        reason = printable(str(obstacle))
        self.node.stash[REFUSED_KEY] = isinstance(obstacle, Refused)
        if isinstance(obstacle, AlreadyReported):
            self.node.stash[ALREADY_REPORTED_KEY] = True
            if obstacle.record is not None:
                self.node.stash[RECORD_KEY] = printable_struct(obstacle.record)
        elif isinstance(obstacle, LockProblem | ChangedMeanwhile | NotJudged):
            pytest.fail(reason, pytrace=False)
        elif self.session.options.require_gpu and not isinstance(obstacle, Refused):
            pytest.fail(f"{reason} (--fa-require-gpu)", pytrace=False)
        pytest.skip(reason)

    def take_output(self) -> str:
        """What the workers printed during this test.  It becomes a section of the report unless it was shown live."""
        output = self.session.runner.take_output()
        if output and self._live is None:
            self.node.stash[OUTPUT_KEY] = output
        return output


def with_output(record: Record, output: str) -> Record:
    """The record; if its test failed, with the end of what the worker printed."""
    if record.outcome == Outcome.OK or not output:
        return record
    return msgspec.structs.replace(record, output=output[-RECORD_CHARACTERS:])
