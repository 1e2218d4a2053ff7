"""One fault, one failure: the first test that meets a fault fails with it, and later tests are skipped."""

from __future__ import annotations

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.properties import property_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.record import Record, RecordKind
from pytest_fa.session.case_runner import CaseRunner, failed_build
from pytest_fa.session.refusals import AlreadyReported, Refused
from pytest_fa.session.session import Session

ENTRY_FAULT = ("entry",)  # `caught_by` of an entry that cannot be loaded or called, for whatever case


class FirstReports:
    """Runs the cases of a run's tests and remembers which tests have reported which faults.

    A test is skipped only if another test of the same run has failed or will fail, so that the run always fails.
    `build_tests` are the variants whose `test_build` is selected.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.build_tests: frozenset[str] = frozenset()
        self._unusable: dict[str, str] = {}  # variant -> the test that reports why it cannot be built or loaded
        self._not_built: set[str] = set()  # of those, the variants whose build failed
        self._wrong: dict[tuple[str, str], str] = {}  # variant and case -> its failed `test_correct`

    def run(self, variant: Variant, case: Case, kind: RecordKind) -> Record:
        """Run one case.  Raises `AlreadyReported` if another test reports the fault, and what the runner raises."""
        test = f"test_{kind}[{variant.name}-{case.shape_id if kind == 'speed' else case.id}]"
        key = (variant.name, case.id)
        if kind == "speed" and key in self._wrong:
            raise AlreadyReported(f"not timed: {self._wrong[key]} failed")
        if kind == "speed" and self._is_companion_of_nothing(variant):
            raise Refused(f"{variant.name} is not timed: no selected variant runs on this machine")
        self._require_usable(variant, case, kind)
        record = self._checked(variant, test, self._runner.run(variant, case, kind))
        if kind == "correct" and record.outcome != "ok":
            self._wrong[key] = test
        elif kind == "correct":
            self._wrong.pop(key, None)
        return record

    def check_property(self, variant: Variant, name: str) -> Record:
        """Check one property.  Raises as `run` does."""
        self._require_usable(variant, property_case(variant), "property", name)
        return self._checked(
            variant, f"test_property[{variant.name}-{name}]", self._runner.check_property(variant, name)
        )

    def _require_usable(self, variant: Variant, case: Case, kind: RecordKind, property_name: str | None = None) -> None:
        """Raise `AlreadyReported` if a test has reported that the variant cannot be built, loaded or called.

        Only a failed build is recorded for every case; a fault of the entry is recorded once, with its message.
        """
        if first := self._unusable.get(variant.name):
            reason, record = f"{variant.name} cannot be run (see {first})", None
            if variant.name in self._not_built:
                result = failed_build(reason)
                record = self._session.records.make(kind, variant, case, result, property_name=property_name)
            raise AlreadyReported(reason, record)

    def _checked(self, variant: Variant, test: str, record: Record) -> Record:
        """The record of a test; if it is the first that reports an unusable variant, with the whole message."""
        if record.outcome == "not_built":
            if variant.name in self.build_tests:
                raise AlreadyReported(record.message, record)
            record = msgspec.structs.replace(record, message=self._session.judge_build(variant).message)
            self._not_built.add(variant.name)
        if record.outcome == "not_built" or record.caught_by == ENTRY_FAULT:
            self._unusable[variant.name] = test
        return record

    def _is_companion_of_nothing(self, variant: Variant) -> bool:
        """Whether a baseline or an empty kernel would only be timed beside variants that this machine cannot run."""
        plan = self._session.run_plan.plan
        has_gpu = find_gpu() is not None
        return plan.is_companion(variant) and not any(each.device_for(gpu=has_gpu) for each in plan.runnable)

    @property
    def _runner(self) -> CaseRunner:
        return self._session.runner
