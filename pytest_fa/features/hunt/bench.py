"""Judges the examples of one variant as its tests do, in the processes of the run."""

from __future__ import annotations

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.properties import property_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.case_strategy import is_usable
from pytest_fa.features.hunt.example import Example, can_test
from pytest_fa.features.hunt.judged import ExampleVerdict
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import RecordKind
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import Refused


class RunBench:
    """Judges one variant with the case runner of a run."""

    def __init__(self, runner: CaseRunner, variant: Variant) -> None:
        self._runner, self._variant = runner, variant

    @property
    def plainest(self) -> Case:
        """The plainest case that the variant supports."""
        return property_case(self._variant)

    def judge(self, example: Example) -> ExampleVerdict:
        """Judge an example with a few calls."""
        return self._judged(example, is_thorough=False)

    def judge_thoroughly(self, example: Example) -> ExampleVerdict:
        """Judge an example with as many calls as the suites make."""
        return self._judged(example, is_thorough=True)

    def is_usable(self, example: Example) -> bool:
        """Whether the example is possible, and the variant claims to support it."""
        return is_usable(example.case, self._variant) and can_test(example.property_name, example.case)

    def _judged(self, example: Example, *, is_thorough: bool) -> ExampleVerdict:
        name = example.property_name or None
        kind: RecordKind = "property" if name else "correct"
        try:
            record = self._runner.run(self._variant, example.case, kind, name, is_thorough=is_thorough)
        except Refused:
            return ExampleVerdict(None)
        may_raise = self._variant.role == "baseline" and name is not None  # a baseline may lack a property
        return ExampleVerdict(None if may_raise and record.outcome == Outcome.FAILED else record)
