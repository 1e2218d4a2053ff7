"""`FaRun`, which the tests of the shipped suite call.  Each method runs one kind of test and records the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_fa.options.command_line import SUITE_FOLDER
from pytest_fa.plugin.markers import gate_of, read_marker
from pytest_fa.plugin.other_plugins import other_plugins
from pytest_fa.plugin.own_process import protect_process
from pytest_fa.plugin.state import (
    ALREADY_REPORTED_KEY,
    OUTPUT_KEY,
    RECORD_KEY,
    REFUSED_KEY,
    case_profiler_of,
    first_reports_of,
    live_output,
    progress_line,
    session_of,
)
from pytest_fa.records.outcome import Outcome

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
        self._node = node
        self._session = session_of(node.config)
        self._first_reports = first_reports_of(node.config)
        self._live = live_output(node.config)
        self._session.runner.show_live(self._live)

    def build(self, variant: Variant | BrokenVariant) -> Record:
        """Check the variant's build.  Fails with the compiler's messages, or with the limits that are exceeded."""
        return self._finish(lambda: self._first_reports.build(self._node.nodeid, variant))

    def correct(self, variant: Variant, case: Case) -> Record:
        """Run the variant on the case and judge its output.  Fails with every bound."""
        return self._finish(lambda: self._first_reports.run(self._node.nodeid, variant, case, "correct"))

    def property(self, variant: Variant, name: str) -> Record:
        """Check one property of the variant.  Fails with the part that does not hold."""
        return self._finish(lambda: self._first_reports.check_property(self._node.nodeid, variant, name))

    def speed(self, variant: Variant, case: Case) -> Record:
        """Run the variant on the case, judge its output, time it, and judge the outputs of the timed calls."""
        return self._finish(lambda: self._first_reports.run(self._node.nodeid, variant, case, "speed"))

    def gate(self, variant: Variant) -> Record:
        """Run the gate of the variant.  Fails with the verdict and every interval."""
        from pytest_fa.features.gate.gate import decide_gate, gate_question  # noqa: PLC0415  # only a gate needs it

        session, say = self._session, progress_line(self._node.config)
        ratio = session.options.gate or read_marker(gate_of, self._node)
        if ratio is None:
            reason = "fa_run.gate: there is no ratio; give --fa-gate=0.95, or mark the test with fa_gate(0.95)"
            pytest.fail(reason, pytrace=False)

        def decide() -> Record:
            question = gate_question(session.run_plan, variant, ratio)
            self._first_reports.require_right(self._node.nodeid, variant, question.cases)
            return decide_gate(session.runner, variant, question, say)

        return self._finish(decide)

    def profile(self, variant: Variant, case: Case) -> Record:
        """Profile the variant with Nsight Compute.  If that is not possible, skips, or fails with --ncu-strict."""
        config = self._node.config
        return self._finish(lambda: case_profiler_of(config).profile(variant, case, progress_line(config)))

    def sanitize(self, variant: Variant, tool: str, case: Case | None = None) -> Record:
        """Run one tool of compute-sanitizer, on a small case if none is given.  Fails with the tool's findings."""
        from pytest_fa.catalog.properties import sanitizer_case  # noqa: PLC0415  # only sanitizers need it
        from pytest_fa.features.sanitize.sanitize import sanitize_variant  # noqa: PLC0415

        sanitized_case = case or sanitizer_case(variant)
        return self._finish(lambda: sanitize_variant(self._session.runner, variant, sanitized_case, tool))

    def selftest(self, variant: Variant) -> Record:
        """Run every check on a kernel of the self-test.  Fails if other checks catch it than should."""
        from pytest_fa.features.selftest.selftest import run_selftest_kernel  # noqa: PLC0415  # only the self-test needs it

        return self._finish(lambda: run_selftest_kernel(self._session.run_plan, self._session.runner, variant))

    def sweep_trial(self, variant: Variant) -> None:
        """Run the next trial of the sweep.  Skips if its configuration cannot win, or if no trial is left."""
        from pytest_fa.features.sweep.sweeping import skip_reason, sweep_run_of  # noqa: PLC0415  # only a sweep needs it
        from pytest_fa.session.refusals import CannotRun  # noqa: PLC0415

        obstacle, reason = None, ""
        try:
            sweep_run = sweep_run_of(self._node.config, variant)
            trial = sweep_run.next_trial()
            reason = skip_reason(trial, "" if trial else sweep_run.closed)
        except CannotRun as problem:
            obstacle = problem
        finally:
            self._take_output()
        if obstacle:
            self._end_without_verdict(obstacle)
        if reason:
            pytest.skip(reason)

    def sweep_end(self, variant: Variant) -> Record:
        """End the sweep.  Fails without a verdict unless the gate of the best configuration passes."""
        from pytest_fa.features.sweep.sweeping import sweep_run_of  # noqa: PLC0415  # only a sweep needs it

        return self._finish(lambda: sweep_run_of(self._node.config, variant).end())

    def _with_own_command(self, record: Record) -> Record:
        """The record; for a user's own test, with a rerun command that names this test and not one of the suite."""
        import msgspec  # noqa: PLC0415  # only a run with items needs these

        from pytest_fa.session.rerun import own_rerun_command  # noqa: PLC0415

        if self._node.path.parent.resolve() == SUITE_FOLDER.resolve():
            return record
        path = os.path.relpath(self._node.path, self._node.config.invocation_params.dir)
        test_id = f"{path}::{self._node.nodeid.partition('::')[2]}"
        command = own_rerun_command(self._session.options, record, test_id)
        return msgspec.structs.replace(record, rerun_command=command)

    def _with_plugins(self, record: Record) -> Record:
        """The record with the names of the plugins that could have changed this run."""
        import msgspec  # noqa: PLC0415  # only a run with items needs it

        return msgspec.structs.replace(record, other_plugins=other_plugins(self._node.config))

    def _finish(self, work: Callable[[], Record]) -> Record:
        from pytest_fa.table.failure import failure_text  # noqa: PLC0415  # only a run with items needs it

        record = self._record(work)
        is_strict = record.kind == "profile" and self._session.options.ncu_strict
        if record.outcome == Outcome.NOT_MEASURED and not is_strict:
            pytest.skip(record.message)
        if record.outcome != Outcome.OK:
            pytest.fail(failure_text(record), pytrace=False)
        return record

    def _record(self, work: Callable[[], Record]) -> Record:
        """Do the work, and keep its record and what the worker printed for the report.

        Skips the test if it cannot run here, or if another test reports its fault.
        """
        from pytest_fa.errors import LockProblem  # noqa: PLC0415  # only a run with items needs these
        from pytest_fa.host.client import WorkerError  # noqa: PLC0415
        from pytest_fa.records.text import printable_struct  # noqa: PLC0415
        from pytest_fa.session.machine_problem import machine_problem, start_problem  # noqa: PLC0415
        from pytest_fa.session.refusals import AlreadyReported, CannotRun, NotJudged  # noqa: PLC0415

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
            output = self._take_output()
        options = self._session.options
        if record and (reason := machine_problem(record, (options.artifacts, options.cache, options.rootdir))):
            record, obstacle = None, NotJudged(reason)
        if record is None:
            self._end_without_verdict(obstacle)
        self._node.stash[RECORD_KEY] = record = with_output(record, output)
        return record

    def _end_without_verdict(self, obstacle: Exception | None) -> NoReturn:
        """Skip the test, or fail it if the obstacle must not be there."""
        from pytest_fa.errors import LockProblem  # noqa: PLC0415  # only a run with items needs these
        from pytest_fa.records.text import printable, printable_struct  # noqa: PLC0415
        from pytest_fa.session.refusals import (  # noqa: PLC0415
            AlreadyReported,
            ChangedMeanwhile,
            NotJudged,
            Refused,
        )

        reason = printable(str(obstacle))
        self._node.stash[REFUSED_KEY] = isinstance(obstacle, Refused)
        if isinstance(obstacle, AlreadyReported):
            self._node.stash[ALREADY_REPORTED_KEY] = True
            if obstacle.record is not None:
                self._node.stash[RECORD_KEY] = printable_struct(obstacle.record)
        elif isinstance(obstacle, LockProblem | ChangedMeanwhile | NotJudged):
            pytest.fail(reason, pytrace=False)
        elif self._session.options.require_gpu and not isinstance(obstacle, Refused):
            pytest.fail(f"{reason} (--fa-require-gpu)", pytrace=False)
        pytest.skip(reason)

    def _take_output(self) -> str:
        """What the workers printed during this test.  It becomes a section of the report unless it was shown live."""
        output = self._session.runner.take_output()
        if output and self._live is None:
            self._node.stash[OUTPUT_KEY] = output
        return output


def with_output(record: Record, output: str) -> Record:
    """The record; if its test failed, with the end of what the worker printed."""
    import msgspec  # noqa: PLC0415  # only a run with items needs these

    from pytest_fa.host.job_output import RECORD_CHARACTERS  # noqa: PLC0415

    if record.outcome == Outcome.OK or not output:
        return record
    return msgspec.structs.replace(record, output=output[-RECORD_CHARACTERS:])
