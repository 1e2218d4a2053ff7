"""The bench of a real sweep: builds, judges and times the configurations of one variant on this machine."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import msgspec

from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.build.resources import broken_limits
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.properties import properties_of
from pytest_fa.catalog.select import with_defines
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import BuildError
from pytest_fa.features.gate.decision import MAX_DROPPED
from pytest_fa.features.gate.gate import GateQuestion, decide_gate
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.sweep.search import BuiltPoint, GateAnswer
from pytest_fa.features.sweep.sweep_space import Point
from pytest_fa.features.sweep.trial_result import ConfirmedRatio, PairedTime, TrialOutcome, TrialResult, trial_outcome
from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.records.built import Build
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.builds import device_of
from pytest_fa.session.refusals import CannotRun, ChangedMeanwhile, Refused
from pytest_fa.session.rerun import rerun_command
from pytest_fa.session.session import Session
from pytest_fa.wire.jobs import ArmPair, PairBlocks, PairedJob, PairedResult

MAX_CLOCK_DIFFERENCE = 0.05  # between the ratios of both clocks, beyond which a time is not used


class KernelBench:
    """The configurations of `parent`, judged and timed on `searched` cases, and checked on `unsearched` ones."""

    def __init__(
        self,
        session: Session,
        parent: Variant,
        searched: tuple[Case, ...],
        unsearched: tuple[Case, ...],
        say: Callable[[str], None],
        require_unchanged: Callable[[], object] = lambda: None,
    ) -> None:
        """`require_unchanged` raises `CannotRun` if a source changed: before and after everything that uses one."""
        self._session, self._runner, self._builds = session, session.runner, session.builds
        self._parent, self._searched, self._unsearched, self._say = parent, searched, unsearched, say
        self._require_unchanged = require_unchanged
        self.gate_record: Record | None = None

    def require_parent(self) -> None:
        """Raise `CannotRun` if this machine cannot build or run the parent, so that no trial could be timed."""
        device_of(self._parent)
        self._builds.arm(self._parent)

    @property
    def parent_code(self) -> str:
        """The machine code of the parent; empty if it has none, as a Python function."""
        build = self._builds.build_for_this_machine(self._parent)
        return (build.code_identity or "") if isinstance(build, Build) else ""

    def build(self, point: Point) -> BuiltPoint | TrialResult:
        """Build a configuration, and compare it with the limits of the manifest."""
        if all(self._parent.defines[name] == value for name, value in point.items()):
            return TrialResult(TrialOutcome.SAME_CODE, "it is the parent itself")
        self._require_unchanged()
        variant = self.variant_of(point)
        try:
            self._builds.add(variant)
            build = self._builds.build_for_this_machine(variant)
        except (BuildError, CannotRun) as problem:
            return TrialResult(TrialOutcome.NOT_BUILT, str(problem))
        if build is None:
            return BuiltPoint("", {}, 0.0)
        if isinstance(build, BuildFailure):
            return TrialResult(TrialOutcome.NOT_BUILT, build.message.partition("\n")[0])
        built = BuiltPoint(build.code_identity or "", _counters(build), build.build_seconds)
        if exceeded := broken_limits(build, variant.limits):
            return TrialResult(
                TrialOutcome.OVER_LIMIT, "; ".join(exceeded), None, {}, built.counters, built.code, None, built.seconds
            )
        return built

    def check_searched(self, point: Point) -> TrialResult | None:
        """Judge the configuration at every searched shape, with repeats; return the first problem."""
        problem = self._first_problem(point, self._searched)
        self._require_unchanged()
        return problem

    def measure(self, point: Point) -> TrialResult:
        """Time the configuration against the parent in blocks of paired calls, in one new process."""
        result = self._paired(point, self._searched)
        if problem_of_process := _problem_of_process(result):
            return problem_of_process
        shapes = {}
        for case, pair in zip(self._searched, result.arm_pairs, strict=True):
            if problem := _untimed(pair, has_two_clocks=device_of(self._parent) == "cuda"):
                return TrialResult(TrialOutcome.NOT_TIMED, f"{case.shape_id}: {problem}")
            shapes[case.shape_id] = PairedTime(pair.candidate_us, pair.baseline_us, statistics.fmean(pair.blocks))
        mean = statistics.fmean(each.log_ratio for each in shapes.values())
        return TrialResult(TrialOutcome.RIGHT, "", mean, shapes)

    def check_unsearched(self, point: Point) -> tuple[int, TrialResult | None]:
        """Judge the configuration at every other case of the run's suites, and in every property."""
        variant, checked = self._built(point), len(self._unsearched)
        if problem := self._first_problem(point, self._unsearched):
            return checked, problem
        for name in properties_of(self._parent):
            try:
                record = self._runner.check_property(variant, name)
            except Refused:
                continue
            _require_judged(record)
            if record.outcome != Outcome.OK:
                return checked, _problem(record)
            checked += 1
        return checked, None

    def measure_unsearched(self, point: Point) -> dict[str, float] | TrialResult:
        """The log-ratio at the first case of each shape that was not searched, in one new process.

        What these calls wrote is judged, too: a process whose outcome is not ok is returned as a problem.
        """
        searched = {case.shape_id for case in self._searched}
        cases = {case.shape_id: case for case in reversed(self._unsearched) if case.shape_id not in searched}
        supported = tuple(case for case in reversed(cases.values()) if self._parent.refuses(case) is None)
        if not supported:
            return {}
        result = self._paired(point, supported)
        if problem := _problem_of_process(result):
            return msgspec.structs.replace(problem, reason=f"timed where it was not searched: {problem.reason}")
        return {
            case.shape_id: statistics.fmean(pair.blocks)
            for case, pair in zip(supported, result.arm_pairs, strict=True)
            if not _untimed(pair, has_two_clocks=False)
        }

    def gate(self, point: Point) -> GateAnswer:
        """Gate the configuration against the parent on the searched shapes.  The record is kept."""
        variant = self._built(point)
        question = GateQuestion(1.0, self._searched, (self._parent,))
        record = decide_gate(self._runner, variant, question, self._say)
        self._require_unchanged()
        words = f"--fa-gate=1 --fa-gate-baseline={self._parent.name}"
        command = f"{rerun_command(self._session.options, 'gate', variant.name, None)} {words}"
        self.gate_record = msgspec.structs.replace(record, rerun_command=f"{command} {_cases_word(self._searched)}")
        if record.outcome == Outcome.BUILD_CHANGED:
            raise ChangedMeanwhile(record.message)
        gate = Gate.of(record)
        if gate is None:
            return GateAnswer(record.outcome, record.message.partition("\n")[0], ())
        ratios = tuple(
            ConfirmedRatio(pair.samples.shape_id, pair.ratio, pair.low, pair.high)
            for pair in gate.pairs
            if pair.ratio is not None and pair.low is not None and pair.high is not None
        )
        return GateAnswer(gate.verdict, gate.reason, ratios)

    def variant_of(self, point: Point) -> Variant:
        """The variant of a configuration: the parent with these defines."""
        return with_defines(self._parent, point)

    def _built(self, point: Point) -> Variant:
        """The variant of a configuration, with its build in this run.

        Another process may have run its trial.  Its build is then taken from the cache, or compiled.  Raises
        `ChangedMeanwhile` if a source changed.
        """
        self._require_unchanged()
        variant = self.variant_of(point)
        self._builds.add(variant)
        return variant

    def _first_problem(self, point: Point, cases: Sequence[Case]) -> TrialResult | None:
        """The first case at which the configuration is not right.  A case that the parent refuses is left out."""
        variant = self._built(point)
        for case in cases:
            if self._parent.refuses(case) is None:
                record = self._runner.run(variant, case, "correct")
                _require_judged(record)
                if record.outcome != Outcome.OK:
                    return _problem(record)
        return None

    def _paired(self, point: Point, cases: tuple[Case, ...]) -> PairedResult:
        """One process of paired timings of the configuration and the parent."""
        device, seed = device_of(self._parent), random.SystemRandom().randrange(2**31)
        variant = self._built(point)
        arms = self._builds.arm(variant), self._builds.arm(self._parent)
        seconds = self._runner.watchdog_seconds(variant, device)
        pairs = tuple(ArmPair(case, *arms) for case in cases)
        policy, shares_gpu = self._runner.tolerance_of(self._parent), self._runner.shares_gpu(device)
        job = PairedJob(pairs, device, policy, seed, seconds, shares_gpu=shares_gpu)
        with timing_lock(self._builds.say):
            self._require_unchanged()
            result = self._runner.workers.run_paired(job)
        self._require_unchanged()
        return result


def _counters(build: Build) -> dict[str, int]:
    """The largest counters among the kernels of a build."""
    return {
        "registers_per_thread": max((each.registers_per_thread for each in build.kernels), default=0),
        "smem_bytes_per_block": max((each.smem_bytes_per_block for each in build.kernels), default=0),
        "instructions": max((sum(each.instructions.values()) for each in build.kernels), default=0),
    }


def _untimed(pair: PairBlocks, *, has_two_clocks: bool) -> str:
    """Why the time of a process cannot be used; empty if it can.  On a CPU, both clocks are the judge's."""
    if pair.dropped > MAX_DROPPED * (pair.dropped + len(pair.blocks)) or not pair.blocks:
        return f"{pair.dropped} of {pair.dropped + len(pair.blocks)} blocks were dropped, because the GPU slowed down"
    if pair.outside_us is None or not has_two_clocks:
        return ""
    outside = math.log(pair.outside_us[0] / pair.outside_us[1])
    if abs(difference := outside - statistics.fmean(pair.blocks)) > MAX_CLOCK_DIFFERENCE:
        return f"the judge's clock gives another ratio, by {100 * math.expm1(difference):+.1f} %"
    return ""


def _require_judged(record: Record) -> None:
    """Raise `CannotRun` if a record says nothing about the configuration."""
    if record.outcome == Outcome.BUILD_CHANGED:
        raise ChangedMeanwhile(record.message)
    if record.unprotected:
        raise CannotRun(f"a sweep needs protected runs, which can be gated: {record.unprotected}")


def _problem_of_process(result: PairedResult) -> TrialResult | None:
    """Why a process of paired timings gave no times; None if it did.  Raises `CannotRun` if a file changed."""
    if result.outcome == Outcome.BUILD_CHANGED:
        raise ChangedMeanwhile(result.message)
    if result.outcome == Outcome.OK:
        return None
    return TrialResult(trial_outcome(result.outcome), result.message.partition("\n")[0])


def _problem(record: Record) -> TrialResult:
    where = record.case.id if record.case else record.id
    caught = f" ({', '.join(record.caught_by)})" if record.caught_by else ""
    reason = f"{where}: {record.message.partition(chr(10))[0]}{caught}"
    return TrialResult(trial_outcome(record.outcome), reason)


def _cases_word(cases: tuple[Case, ...]) -> str:
    return f"--fa-case={','.join(case.id for case in cases)}"
