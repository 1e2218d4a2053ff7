"""One fault, one failure: the first test that meets a fault fails with it, and later tests are skipped."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import ENTRY
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record, RecordKind
from pytest_fa.session.case_runner import CaseRunner, failed_build
from pytest_fa.session.refusals import AlreadyReported, Refused
from pytest_fa.session.session import Session


class FirstReports:
    """Runs the cases of a run's tests and remembers which tests have failed with which faults.

    Tests are named by their node ids.  A test is skipped only if another test of this process has failed with its
    fault, or if the variant's `test_build` is selected, which reports a failed build.  A test that was allowed to fail,
    such as one that is marked xfail, reports nothing.  `build_tests` are the variants whose `test_build` is selected.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.build_tests: frozenset[str] = frozenset()
        self._unusable: dict[str, str] = {}  # variant -> the test that failed because it cannot be built or loaded
        self._not_built: set[str] = set()  # of those, the variants whose build failed
        self._wrong: dict[tuple[str, str], str] = {}  # variant and case -> its failed `test_correct`
        self._met: dict[str, tuple[str, tuple[str, str] | None]] = {}  # test -> variant that it cannot use, wrong case
        self._failed_builds: dict[BuildFailure, str] = {}  # a compilation that several variants share -> the test
        self._met_builds: dict[str, list[BuildFailure]] = {}  # test -> those that it met
        self._untimed: dict[str, set[str]] = {}  # shape -> the selected variants whose `test_speed` gave no time
        self._met_torch: set[str] = set()  # the tests for which torch could not be imported
        self._without_torch = ""  # the first of them that has failed

    def build(self, test: str, variant: Variant | BrokenVariant) -> Record:
        """Judge the builds of a variant.

        Raises `AlreadyReported` if another test has failed with the same compilations, which several variants share.
        """
        record = self._session.build_record(variant)
        if record.outcome != Outcome.NOT_BUILT or isinstance(variant, BrokenVariant):
            return record
        if reason := self._reported_elsewhere(test, variant):
            raise AlreadyReported(reason, self._session.build_record(variant, reason))
        return record

    def run(self, test: str, variant: Variant, case: Case, kind: RecordKind) -> Record:
        """Run one case.

        Raises `AlreadyReported` if another test has failed with the fault, and what the runner raises.
        """
        key = (variant.name, case.id)
        if kind == "speed" and self._wrong.get(key, test) != test:
            self._untimed.setdefault(case.shape_id, set()).add(variant.name)
            raise AlreadyReported(f"not timed: {_name(self._wrong[key])} failed")
        if kind == "speed" and self._is_companion_of_nothing(variant):
            raise Refused(f"{variant.name} is not timed: no selected variant runs on this machine")
        if kind == "speed":
            return self._timed(test, variant, case)
        return self._judged(test, variant, case, kind)

    def _timed(self, test: str, variant: Variant, case: Case) -> Record:
        """Time a variant; raises `Refused` for a baseline at a shape at which no selected variant could be timed."""
        selected = {each.name for each, at in self._session.run_plan.plan.first_seeds if at.shape_id == case.shape_id}
        is_companion = self._session.run_plan.plan.is_companion(variant)
        if is_companion and selected and selected <= self._untimed.get(case.shape_id, set()):
            raise Refused(f"{variant.name} is not timed: no selected variant was timed at {case.shape_id}")
        self._untimed.setdefault(case.shape_id, set()).add(variant.name)
        record = self._judged(test, variant, case, "speed")
        if record.outcome == Outcome.OK:
            self._untimed[case.shape_id].discard(variant.name)
        return record

    def _judged(self, test: str, variant: Variant, case: Case, kind: RecordKind) -> Record:
        self._require_usable(test, variant, case, kind)
        record = self._checked(test, variant, self._runner.run(variant, case, kind))
        key = (variant.name, case.id)
        if kind == "correct" and record.outcome != Outcome.OK:
            self._met[test] = (self._met.get(test, ("", None))[0], key)
        elif kind == "correct":
            self._wrong.pop(key, None)  # the test was repeated, and passes now
        return record

    def check_property(self, test: str, variant: Variant, name: str) -> Record:
        """Check one property.  Raises as `run` does."""
        self._require_usable(test, variant, self._runner.case_of_property(variant, name), "property", name)
        return self._checked(test, variant, self._runner.check_property(variant, name), name)

    def require_right(self, test: str, variant: Variant, cases: Iterable[Case], otherwise: str) -> None:
        """Raise `AlreadyReported` if a test has failed because the variant is unusable or wrong at one of the cases.

        `otherwise` says what is then not done.
        """
        failed = [self._wrong.get((variant.name, case.id)) for case in cases]
        first = self._unusable.get(variant.name) or next(filter(None, failed), None)
        if first and first != test:
            raise AlreadyReported(f"{otherwise}: {_name(first)} failed")

    def note_no_torch(self, test: str) -> None:
        """Take note that torch cannot be imported.  Raises `AlreadyReported` if another test has failed with that."""
        self._require_torch(test)
        self._met_torch.add(test)

    def _require_torch(self, test: str) -> None:
        if self._without_torch not in ("", test):
            raise AlreadyReported(f"torch cannot be imported (see {_name(self._without_torch)})")

    def note_failure(self, test: str) -> None:
        """Take note that a test has really failed: from now on, it reports the fault that it met."""
        variant, wrong_case = self._met.pop(test, ("", None))
        if variant:
            self._unusable.setdefault(variant, test)
        if wrong_case:
            self._wrong.setdefault(wrong_case, test)
        if test in self._met_torch:
            self._without_torch = self._without_torch or test
        for failure in self._met_builds.pop(test, ()):
            self._failed_builds.setdefault(failure, test)

    def _reported_elsewhere(self, test: str, variant: Variant) -> str:
        """Why a test does not report a failed build: others have failed with all its compilations.

        Empty if it is to report it; it then reports those that the variant shares with others.
        """
        failures = self._session.builds.failures_of(variant)
        reported = [self._failed_builds.get(failure.of_all, test) for failure in failures]
        if reported and test not in reported:
            return f"build of {variant.name} failed: it is that of {_name(reported[0])}"
        self._met_builds[test] = [failure.of_all for failure in failures if len(failure.shared_by) > 1]
        return ""

    def _require_usable(
        self, test: str, variant: Variant, case: Case, kind: RecordKind, property_name: str | None = None
    ) -> None:
        """Raise `AlreadyReported` if another test has failed because the variant cannot be built, loaded or called.

        Only a failed build is recorded for every case; a fault of the entry is recorded once, with its message.
        """
        self._require_torch(test)
        first = self._unusable.get(variant.name, test)
        if first == test:
            return
        reason, record = f"{variant.name} cannot be run (see {_name(first)})", None
        if variant.name in self._not_built:
            result = failed_build(reason)
            record = self._session.records.make(kind, variant, case, result, property_name=property_name)
        raise AlreadyReported(reason, record)

    def _checked(self, test: str, variant: Variant, record: Record, property_name: str | None = None) -> Record:
        """The record of a test; if it is the first that meets a failed build, with the compiler's whole message."""
        if record.outcome == Outcome.NOT_BUILT:
            if variant.name in self.build_tests:
                raise AlreadyReported(record.message, record)
            elsewhere = self._reported_elsewhere(test, variant)
            result = failed_build(elsewhere or self._session.build_record(variant).message)
            kind, case = record.kind, record.case
            record = self._session.records.make(kind, variant, case, result, property_name=property_name)
            if elsewhere:
                raise AlreadyReported(elsewhere, record)
            self._not_built.add(variant.name)
        if record.outcome == Outcome.NOT_BUILT or record.caught_by == (ENTRY,):
            self._met[test] = (variant.name, None)
        return record

    def _is_companion_of_nothing(self, variant: Variant) -> bool:
        """Whether a baseline or an empty kernel would only be timed beside variants that this machine cannot run."""
        plan = self._session.run_plan.plan
        has_gpu = find_gpu() is not None
        return plan.is_companion(variant) and not any(each.device_for(gpu=has_gpu) for each in plan.runnable)

    @property
    def _runner(self) -> CaseRunner:
        return self._session.runner


def _name(test: str) -> str:
    """The name of a test without its file, as the terminal shows it below a heading."""
    return test.rpartition("::")[2]
