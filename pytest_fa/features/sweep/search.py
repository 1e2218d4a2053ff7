"""The search: one trial after another, each judged before it is timed.  `run_trial` is the flow of one trial."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import msgspec

from pytest_fa.features.sweep.shared_study import SharedStudy
from pytest_fa.features.sweep.suggest import Suggester
from pytest_fa.features.sweep.sweep_space import Point
from pytest_fa.features.sweep.trial_result import ConfirmedRatio, SweepTrial, TrialOutcome, TrialResult


class BuiltPoint(NamedTuple):
    """What is known of a configuration after its build: its machine code, if it has any, and its counters."""

    code: str
    counters: dict[str, int]
    seconds: float


class GateAnswer(NamedTuple):
    """The verdict of the gate of a configuration against the parent."""

    verdict: str
    reason: str
    ratios: tuple[ConfirmedRatio, ...]


class Bench(Protocol):
    """Builds, judges and times configurations: the kernels of a run, or recorded times in a simulation."""

    @property
    def parent_code(self) -> str:
        """The machine code of the parent; empty if it has none."""

    def build(self, point: Point) -> BuiltPoint | TrialResult:
        """Build a configuration, or return why it is not tried: it does not compile, or exceeds the limits."""

    def check_searched(self, point: Point) -> TrialResult | None:
        """Judge a configuration at the searched shapes; return what is wrong, or None if it is right."""

    def measure(self, point: Point) -> TrialResult:
        """Time a configuration against the parent in one new process, and judge what the timed calls wrote."""

    def check_unsearched(self, point: Point) -> tuple[int, TrialResult | None]:
        """Judge a configuration where it was not searched; return the number of checks, and what is wrong."""

    def measure_unsearched(self, point: Point) -> dict[str, float] | TrialResult:
        """The log-ratios at the shapes that were not searched; or what is wrong with what these calls wrote."""

    def gate(self, point: Point) -> GateAnswer:
        """Gate a configuration against the parent, in processes that nothing of the sweep has seen."""


def run_trial(study: SharedStudy, suggester: Suggester, bench: Bench, budget: int) -> SweepTrial | None:
    """Run the next trial of a study; None if the budget or the space is used up.

    Configurations whose machine code another trial has are stored without a run, and the next one is tried.
    """
    while trial := study.claim(suggester, budget):
        start = time.monotonic()
        try:
            result = _evaluate(study, bench, trial)
        except BaseException:
            study.release(trial)
            raise
        result = msgspec.structs.replace(result, seconds=time.monotonic() - start)
        study.finish(trial, result)
        if result.outcome != TrialOutcome.SAME_CODE:
            return msgspec.structs.replace(trial, state="ended", result=result)
    return None


def _evaluate(study: SharedStudy, bench: Bench, trial: SweepTrial) -> TrialResult:
    """Build, compare the machine code, judge, and only then time."""
    built = bench.build(trial.point)
    if isinstance(built, TrialResult):
        return built
    known = TrialResult(TrialOutcome.SAME_CODE, counters=built.counters, code=built.code, build_seconds=built.seconds)
    if built.code and built.code == bench.parent_code:
        return msgspec.structs.replace(known, reason="the parent has the same machine code")
    if twin := study.note_code(trial, built.code):
        reason = f"trial #{twin.number} has the same machine code"
        return msgspec.structs.replace(known, reason=reason, same_as=twin.number)
    measured = bench.check_searched(trial.point) or bench.measure(trial.point)
    return msgspec.structs.replace(measured, counters=built.counters, code=built.code, build_seconds=built.seconds)
