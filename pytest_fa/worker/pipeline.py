"""`run_case`: what happens to one variant on one case, from left to right.

launch -> sanity (repeats, NaN) -> correct (bounds) -> speed (times, and the outputs of the timed calls)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from pytest_fa.errors import DeviceLost, WrongResult
from pytest_fa.judge.check import judge, require_output
from pytest_fa.judge.cross_checks import cross_check_all
from pytest_fa.judge.delegation import require_no_delegation
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.properties import PROPERTIES
from pytest_fa.judge.repeats import repeat, require_identical
from pytest_fa.judge.subject import Subject
from pytest_fa.judge.truth import Truth
from pytest_fa.measure.measure import measure
from pytest_fa.records.judged import Check, Diagnosis, Repeats
from pytest_fa.records.record import Outcome
from pytest_fa.records.timing import Speed
from pytest_fa.run.checked import CheckedLaunch
from pytest_fa.run.device import is_alive, open_device
from pytest_fa.run.forward import Forward
from pytest_fa.run.guards import Workspaces
from pytest_fa.run.inputs import make_inputs
from pytest_fa.run.module import open_forward
from pytest_fa.worker.jobs import CaseJob, CaseResult
from pytest_fa.worker.stages import Stages, Tell, message_of, outcome_of

# The check that is named where a kernel gave nothing to judge.
CAUGHT_BY_OUTCOME: dict[str, tuple[str, ...]] = {
    "failed": ("exception",),
    "launch_failed": ("launch",),
    "device_error": ("device error",),
}


def run_case(job: CaseJob, tell: Tell = lambda _: None) -> CaseResult:
    """Load, launch, judge and time one variant on one case.

    `tell` is called before each step with the time that the step may take.  The candidate runs before the truth is
    computed, so stale memory cannot hold the answer.  A stage that fails ends the run, so a failed check has no
    timing.  Never raises for what a kernel does.
    """
    stages, findings = Stages(job, tell), Findings()
    with ExitStack() as scope:
        try:
            with stages("launch"):
                device = open_device(job.device)
                workspaces = Workspaces()
                forward = scope.enter_context(open_forward(job.variant, job.library, workspaces, job.case.computes))
                launch = CheckedLaunch(forward, make_inputs(job.case, device), workspaces, job.case.computes)
                findings.out = _first_output(job, launch, stages)
            if job.property_name:
                with stages("correct"):
                    _hold_to_property(job, forward, device, stages)
            elif job.judge:
                with stages("sanity"):
                    _check_sanity(job, launch, findings, stages)
                with stages("correct"):
                    _require_passed(findings.judged_check, "")
                    _require_repeats(job, findings)
            if job.time:
                with stages("speed"):
                    _time(job, forward, launch, findings, stages)
            return findings.result("ok", "", stages)
        except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; each becomes a named outcome
            alive = job.device == "cpu" or (not isinstance(problem, DeviceLost) and is_alive(device))
            outcome = outcome_of(problem) if alive else "device_error"
            findings.caught_by = CAUGHT_BY_OUTCOME.get(outcome, ())
            if isinstance(problem, WrongResult) and alive:
                findings.caught_by = problem.caught_by
                if findings.check and findings.truth:
                    stages.wait(findings.result(outcome, message_of(problem), stages, context_lost=True))
                    findings.diagnosis = _diagnose(job, findings, launch)
                    alive = job.device == "cpu" or is_alive(device)
            return findings.result(outcome, message_of(problem), stages, context_lost=not alive)


@dataclasses.dataclass
class Findings:
    """What is known of the candidate so far.  Each stage adds to it; no stage reads what a later one adds."""

    out: torch.Tensor | None = None  # [batch, heads, seq_q, head_dim or seq_k], the output that `check` is about
    truth: Truth | None = None
    check: Check | None = None
    repeats: Repeats | None = None
    farthest: torch.Tensor | None = None  # the repeat that differs most from the first output
    diagnosis: Diagnosis | None = None
    speed: Speed | None = None
    caught_by: tuple[str, ...] = ()

    @property
    def judged_out(self) -> torch.Tensor:
        """The output; there is one from the first launch on."""
        assert self.out is not None  # noqa: S101  # run_case launches before it judges
        return self.out

    @property
    def judged_truth(self) -> Truth:
        """The truth; there is one from stage `sanity` on."""
        assert self.truth is not None  # noqa: S101  # run_case judges before it compares anything else
        return self.truth

    @property
    def judged_check(self) -> Check:
        """The check of `out`; there is one from stage `sanity` on."""
        assert self.check is not None  # noqa: S101  # as above
        return self.check

    def result(self, outcome: Outcome, message: str, stages: Stages, *, context_lost: bool = False) -> CaseResult:
        """The figures without the tensors."""
        return CaseResult(
            outcome=outcome,
            message=message,
            stages=stages.all(),
            caught_by=self.caught_by,
            check=self.check,
            repeats=self.repeats,
            diagnosis=self.diagnosis,
            speed=self.speed,
            context_lost=context_lost,
        )


# -- launch -----------------------------------------------------------------------------------------------------------


def _first_output(job: CaseJob, launch: CheckedLaunch, stages: Stages) -> torch.Tensor:
    """The output of the first call that counts, after the job's warm-up calls."""
    for _ in range(job.warm_ups):
        stages.watch()
        launch.once(f"warm_up-{job.slug}")
    stages.watch()
    return launch.once(job.slug)


# -- sanity and correct -----------------------------------------------------------------------------------------------


def _hold_to_property(job: CaseJob, forward: Forward, device: torch.device, stages: Stages) -> None:
    """Call the variant as the property says.  Raises `WrongResult` where it does not hold."""
    assert job.property_name is not None  # noqa: S101  # the caller has one
    subject = Subject(job.variant, job.library, job.case, job.policy, forward, device, stages.watch)
    PROPERTIES[job.property_name](subject)


def _check_sanity(job: CaseJob, launch: CheckedLaunch, findings: Findings, stages: Stages) -> None:
    """Inputs and guard bands are untouched, calls are repeated, the output is judged and holds no NaN."""
    findings.out = require_output(findings.out, launch.given).clone()  # the next call overwrites it
    launch.require_untouched()
    _repeat(job, launch, findings, stages)
    stages.wait()
    findings.truth = truth_of(job.case.computes, launch.untouched, job.variant.rounds, job.policy)
    findings.check = judge(findings.out, findings.truth, job.policy)
    _require_finite(findings.check)


def _repeat(job: CaseJob, launch: CheckedLaunch, findings: Findings, stages: Stages) -> None:
    """Call again and compare bit by bit; then call once more under the delegation check, where one is needed."""
    if job.repeats != 0:
        findings.repeats, findings.farthest = repeat(
            lambda: require_output(launch.again(), launch.given),
            findings.judged_out,
            job.repeats,
            launch.smem_poison_missing,
            stages.watch,
            keep_farthest=not job.variant.deterministic,
        )
        launch.require_untouched()
    if job.variant.entry.kind != "cuda" and job.variant.role != "baseline":
        require_no_delegation(launch)


def _require_repeats(job: CaseJob, findings: Findings) -> None:
    """Repeats are equal bit by bit; where a variant may differ, the repeat farthest from the first output is right."""
    if findings.repeats and findings.repeats.differing:
        require_identical(findings.repeats, deterministic=job.variant.deterministic)
        if findings.farthest is not None:
            _judge_again(findings.farthest, findings, job.policy, " in a repeat", "repeats")


# -- speed ------------------------------------------------------------------------------------------------------------


def _time(job: CaseJob, forward: Forward, launch: CheckedLaunch, findings: Findings, stages: Stages) -> None:
    """Measure, then judge the outputs that the timed calls wrote.  The speed is kept only if all are right."""
    speed, outputs = measure(forward, job.case, launch.inputs, job.slug, stages.watch)
    launch.require_untouched()
    if job.judge:
        _judge_timed(outputs, findings, job.policy)
    findings.speed = speed


def _judge_timed(outputs: Iterable[torch.Tensor], findings: Findings, policy: str) -> None:
    """Judge each output, unless it equals the output that was judged first bit by bit."""
    judged_bits = findings.judged_out.view(torch.int16)
    for output in outputs:
        out = require_output(output, findings.judged_out)
        if not torch.equal(out.view(torch.int16), judged_bits):
            _judge_again(out, findings, policy, " in an output of the timed calls", "timed outputs")


# -- verdicts ---------------------------------------------------------------------------------------------------------


def _judge_again(out: torch.Tensor, findings: Findings, policy: str, where: str, caught_by: str) -> None:
    """Judge a later output.  The check and the diagnosis of a failure are then those of this output."""
    findings.out, findings.check = out, judge(out, findings.judged_truth, policy)
    _require_passed(findings.check, where, caught_by)


def _require_finite(check: Check) -> None:
    if check.nonfinite_count:
        nonfinite, total = check.nonfinite_count, check.element_count
        message = f"{nonfinite} of {total} elements are NaN or Inf (the output was full of NaN before the call)"
        raise WrongResult("finite", message)


def _require_passed(check: Check, where: str, caught_by: str = "") -> None:
    if not check.passed:
        broken = tuple(bound.name for bound in check.bounds if bound.judged and not bound.holds)
        raise WrongResult(caught_by or broken, f"{check.complaint}{where}")


def _diagnose(job: CaseJob, findings: Findings, launch: CheckedLaunch) -> Diagnosis:
    """Say more about a wrong output.  An error in here never hides the wrong output itself."""
    out, truth, check = findings.judged_out, findings.judged_truth, findings.judged_check
    try:
        cross_checks = cross_check_all(job.cross_checks, launch.untouched, truth, job.policy)
        return diagnose(out, truth, launch.untouched, check, findings.repeats, cross_checks, job.case.computes)
    except Exception as problem:  # noqa: BLE001
        return Diagnosis((), f"not diagnosed: {problem}", (), "")
