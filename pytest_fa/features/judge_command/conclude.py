"""The verdict on one variant, from the records of its run alone: the status, the reason, and what to do next."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.gate.decision import CONFIDENCE, control_of
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.judge_command.document import (
    ComparedCounter,
    FailurePlace,
    JudgedBottleneck,
    JudgedChecks,
    JudgedFailure,
    JudgedRatio,
    ShapeTime,
    Status,
)
from pytest_fa.features.judge_command.question import COMMAND, Question
from pytest_fa.features.ncu.nsight_report import NsightReport
from pytest_fa.records.outcome import Defect, Outcome
from pytest_fa.records.record import Record

STATUS_OF_GATE: dict[str, Status] = {
    "PASS": Status.FASTER,
    "FAIL": Status.SLOWER,
    "INCONCLUSIVE": Status.UNDECIDED,
}
COUNTED_KINDS = ("correct", "property")  # the checks; what is timed is judged as well
MAX_CHARACTERS = 20_000  # of a message in the document; the record has all of it


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run gave: the records of the variant, why tests did not run, and a problem of the run itself."""

    records: tuple[Record, ...]
    not_run: Counter[str] = dataclasses.field(default_factory=Counter)
    problem: str = ""

    @property
    def failure(self) -> Record | None:
        """The record of the proven cheat, else of the first failure; None if nothing failed."""
        failed = [record for record in self.records if record.outcome.is_failure and not Gate.of(record)]
        return next((record for record in failed if record.outcome == Outcome.CHEAT), failed[0] if failed else None)

    @property
    def gate(self) -> Gate | None:
        """The decided gate, if there is one."""
        return next(filter(None, map(Gate.of, self.records)), None)


def conclude(variant: Variant, run: RunResult) -> tuple[Status, str]:
    """The status, and the reason in one sentence.

    Nothing but a gate that passed beside at least one case that was judged to be right makes a variant faster.
    """
    name, failure, gate = variant.name, run.failure, run.gate
    if failure is not None:
        first_line = failure.message.partition("\n")[0]
        return status_of(failure.outcome), f"{failure.id}: {failure.outcome.headline}{first_line}"
    if run.problem:
        return Status.MACHINE, run.problem
    if unprotected := next((record.unprotected for record in run.records if record.unprotected), ""):
        return Status.MACHINE, f"{name} was judged unprotected: {unprotected}"
    if gate is not None and any(record.kind == "correct" and record.outcome == Outcome.OK for record in run.records):
        doubtless = far_slower(gate)
        status = Status.SLOWER if doubtless else STATUS_OF_GATE[gate.verdict]
        return status, f"{name} < {gate.ratio:g} x baseline: {doubtless}{gate.reason}"
    undecided = next((record for record in run.records if record.outcome == Outcome.INCONCLUSIVE), None)
    if undecided is not None:
        return Status.UNDECIDED, f"{undecided.id}: no verdict: {undecided.message}"
    ((reason, _),) = run.not_run.most_common(1) or (("no test of it ran", 0),)
    return Status.MACHINE, f"{name} was not judged: {reason}"


def status_of(outcome: Outcome) -> Status:
    """The status of a failure.  A variant that exceeds its limits counts as not built."""
    defect = outcome.defect or Defect.WRONG  # a failed gate has measurements, so its verdict was taken before
    return Status.NOT_BUILT if defect is Defect.OVER_LIMIT else Status(defect)


def far_slower(gate: Gate) -> str:
    """Why a gate that the noise of the machine kept from a verdict leaves no doubt: one shape is far slower.

    The lower end of its ratio is above the required one, even with the largest deviation of the A/A controls taken
    away.  Empty for a gate with a verdict, or if that does not hold.
    """
    deviation = max((control_of(pair.samples)[1] for pair in gate.pairs), default=math.inf)
    if gate.verdict != "INCONCLUSIVE" or not math.isfinite(deviation):
        return ""
    for pair in gate.pairs:
        least = 0.0 if pair.low is None else pair.low * math.exp(-max(0.0, deviation))
        if least > gate.ratio:
            return f"the ratio at {pair.samples.shape_id} is above {least:.4f}, whatever the noise; "
    return ""


# -- the parts of the document ----------------------------------------------------------------------------------------


def ratios_of(gate: Gate | None) -> tuple[JudgedRatio, ...]:
    """The ratio of each pair of a gate."""
    pairs = gate.pairs if gate else ()
    return tuple(
        JudgedRatio(pair.samples.shape_id, pair.samples.baseline, pair.ratio, pair.low, pair.high, CONFIDENCE)
        for pair in pairs
    )


def largest(ratios: tuple[JudgedRatio, ...]) -> JudgedRatio | None:
    """The ratio that decides: the largest one, or one that is not finite."""
    return max(ratios, key=lambda ratio: math.inf if ratio.value is None else ratio.value, default=None)


def checks_of(run: RunResult) -> JudgedChecks:
    """How many cases and properties passed and failed, and why tests did not run."""
    judged = [record.outcome == Outcome.OK for record in run.records if record.kind in COUNTED_KINDS]
    return JudgedChecks(sum(judged), len(judged) - sum(judged), dict(run.not_run.most_common()))


def failure_of(record: Record | None) -> JudgedFailure | None:
    """The failure of a record."""
    if record is None:
        return None
    check, diagnosis = record.check, record.diagnosis
    is_bad = check is not None and not check.passed
    return JudgedFailure(
        kind=record.kind,
        id=record.id,
        outcome=record.outcome,
        checks=record.caught_by,
        message=record.message[:MAX_CHARACTERS],
        case=record.case.id if record.case else None,
        policy=check.policy if check else None,
        bounds=check.bounds if check else (),
        place=_place_of(record) if is_bad else None,
        cause=diagnosis.cause if diagnosis else "",
        pytest_command=record.rerun_command,
    )


def _place_of(record: Record) -> FailurePlace | None:
    check = record.check
    if check is None:
        return None
    return FailurePlace(
        bad_count=check.bad_count,
        element_count=check.element_count,
        first_bad=check.first_bad,
        worst=check.worst,
        worst_got=check.worst_got,
        worst_want=check.worst_want,
        error_map=record.diagnosis.error_map if record.diagnosis else (),
    )


def times_of(variant: Variant, gate: Gate | None) -> tuple[ShapeTime, ...]:
    """The times of the gate's pilot."""
    return tuple(
        ShapeTime(shape, times.get(variant.name), {name: us for name, us in times.items() if name != variant.name})
        for shape, times in (gate.pilot_us if gate else {}).items()
    )


def bottlenecks_of(run: RunResult) -> tuple[JudgedBottleneck, ...]:
    """What decides the time at each profiled shape, beside the baseline's counters."""
    parts = []
    for record in run.records:
        report = NsightReport.of(record)
        kernel = report.longest if report else None
        if report is None or record.case is None or kernel is None or kernel.bottleneck is None:
            continue
        beside = tuple(ComparedCounter(each.label, each.ours, each.theirs) for each in report.differences)
        decided = kernel.bottleneck
        parts.append(
            JudgedBottleneck(
                shape=record.case.shape_id,
                kernel=kernel.name,
                bound_by=decided.bound_by,
                sentence=decided.sentence,
                counters=decided.decided_by,
                baseline=report.baseline,
                beside=beside,
            )
        )
    return tuple(parts)


# -- what to do next --------------------------------------------------------------------------------------------------


def next_steps(question: Question, status: Status, run: RunResult, *, on_gpu: bool) -> tuple[str, ...]:
    """What to do or to type next, most useful first."""
    if run.failure is not None:
        return (*_after(question, status), f"one test alone: {run.failure.rerun_command}")
    if status == Status.SLOWER and not bottlenecks_of(run):
        command = shlex.join([*COMMAND, *question.words, "--ncu"])
        return (f"see what decides the time: {command}",) if on_gpu and not question.ncu else ()
    return _after(question, status)


def _after(question: Question, status: Status) -> tuple[str, ...]:
    steps: dict[Status, tuple[str, ...]] = {
        Status.FASTER: ("judge shapes with tails and masks as well: --suite=edge",) if not question.suite else (),
        Status.CHEAT: ("docs/reference/checks.md#cheat says what counts as proof",),
        Status.HUNG: ("if a launch may take so long, allow it: --watchdog=SECONDS",) if not question.watchdog else (),
        Status.REFUSED: ("state in `supports` of the manifest what the kernel refuses, or let it compute this case",),
        Status.MACHINE: ("see what this machine lacks: python -m pytest_fa doctor",),
        Status.UNDECIDED: (
            "repeat it on a machine on which nothing else runs, or choose a ratio farther from the measured one",
        ),
        Status.USAGE: (f"{shlex.join(COMMAND)} --help",),
    }
    return steps.get(status, ())
