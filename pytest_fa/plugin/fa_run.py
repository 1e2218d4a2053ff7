"""`FaRun`: what the shipped suite's tests call.  Each method hands one item's work to the feature that does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_fa.plugin.markers import gate_of, read_marker
from pytest_fa.plugin.state import RECORD_KEY, case_profiler_of, progress_line, session_of

if TYPE_CHECKING:
    from pytest_fa.catalog.case import Case
    from pytest_fa.catalog.variant import BrokenVariant, Variant
    from pytest_fa.records.record import Record


class FaRun:
    """One item's work: through the builder, a worker process or a tool, to a record.

    A method fails the test where the record is not ok, skips it where this machine or the variant cannot run it, and
    returns the record otherwise.
    """

    def __init__(self, node: pytest.Item) -> None:
        self._node = node
        self._session = session_of(node.config)

    def build(self, variant: Variant | BrokenVariant) -> Record:
        """Judge the variant's build; fails with the compiler's lines or the broken limits."""
        return self._finish(lambda: self._session.judge_build(variant))

    def correct(self, variant: Variant, case: Case) -> Record:
        """Run and judge; fails with every bound."""
        return self._finish(lambda: self._session.runner.run(variant, case, "correct"))

    def property(self, variant: Variant, name: str) -> Record:
        """Hold to a property; fails with what did not hold."""
        return self._finish(lambda: self._session.runner.hold_to_property(variant, name))

    def speed(self, variant: Variant, case: Case) -> Record:
        """Run, judge, time, and judge the outputs of the timed calls."""
        return self._finish(lambda: self._session.runner.run(variant, case, "speed"))

    def gate(self, variant: Variant) -> Record:
        """Gate against the baselines; fails with the verdict and every interval."""
        from pytest_fa.gate.run import hold_gate, question_of  # noqa: PLC0415  # only a gate needs it

        session, say = self._session, progress_line(self._node.config)
        ratio = session.options.gate or read_marker(gate_of, self._node)
        if ratio is None:
            reason = "fa_run.gate: there is no ratio; give --fa-gate, or mark the test with fa_gate(0.95)"
            pytest.fail(reason, pytrace=False)
        return self._finish(lambda: hold_gate(session.runner, variant, question_of(session.asked, variant, ratio), say))

    def profile(self, variant: Variant, case: Case) -> Record:
        """Count under Nsight Compute; skips, or fails under --ncu-strict, with the reason why nothing was counted."""
        config = self._node.config
        return self._finish(lambda: case_profiler_of(config).profile(variant, case, progress_line(config)))

    def sanitize(self, variant: Variant, tool: str, case: Case | None = None) -> Record:
        """Run one tool of compute-sanitizer, on a small case where none is given; fails with what the tool reports."""
        from pytest_fa.catalog.properties import sanitizer_case  # noqa: PLC0415  # only where it was asked for
        from pytest_fa.sanitize.run import sanitize_variant  # noqa: PLC0415

        asked = case or sanitizer_case(variant)
        return self._finish(lambda: sanitize_variant(self._session.runner, variant, asked, tool))

    def selftest(self, variant: Variant) -> Record:
        """Try every check on a kernel of the self-test; fails where the checks catch too little or too much."""
        from pytest_fa.selftest.run import judge_the_judge  # noqa: PLC0415  # only the self-test needs it

        return self._finish(lambda: judge_the_judge(self._session.asked, self._session.runner, variant))

    def _finish(self, work: Callable[[], Record]) -> Record:
        from pytest_fa.report.failure import failure_text  # noqa: PLC0415  # only a run with items needs these
        from pytest_fa.session.refusals import CannotRun, Refused  # noqa: PLC0415

        options = self._session.options
        record = reason = None
        try:
            record = work()
        except CannotRun as problem:
            reason = problem
        if record is None:
            if options.require_gpu and not isinstance(reason, Refused):
                pytest.fail(f"{reason} (--fa-require-gpu)", pytrace=False)
            pytest.skip(str(reason))
        self._node.stash[RECORD_KEY] = record
        is_strict = record.kind == "profile" and options.ncu_strict
        if record.outcome == "not_measured" and not is_strict:
            pytest.skip(record.message)
        if record.outcome != "ok":
            pytest.fail(failure_text(record), pytrace=False)
        return record
