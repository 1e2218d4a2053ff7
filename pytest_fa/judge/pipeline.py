"""`run_case` runs one variant on one case, in up to four stages.  It is the judge's: the variant runs elsewhere.

launch   load the variant and call it
sanity   inputs and guard bands are intact; the call is repeated; truth is computed; the output has no NaN or Inf
correct  the output is within the bounds of the tolerance policy; the repeats agree; memory is within its limits
speed    the calls are timed, and the outputs of the timed calls are checked

The first stage that fails ends the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import GRADIENTS
from pytest_fa.attention.rows import RowTruth
from pytest_fa.build.unchanged import FilesOfJob, require_unchanged
from pytest_fa.errors import ENTRY, DeviceLost, StoppedJudge, Tampering, WrongResult
from pytest_fa.gpu.device import is_alive, open_device
from pytest_fa.gpu.inputs import Inputs, Output
from pytest_fa.gpu.shared_memory import NoSharing
from pytest_fa.judge.call_memory import CallMemory, require_within
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.checked_launch import CheckedLaunch
from pytest_fa.judge.clocks.device_time import NothingLaunched
from pytest_fa.judge.clocks.fresh_data import Written, stacked
from pytest_fa.judge.clocks.measure import measure, require_honest_clock
from pytest_fa.judge.connection import CandidateLost
from pytest_fa.judge.delegation import require_no_delegation
from pytest_fa.judge.diagnosis import conclusion, diagnose, kept_state
from pytest_fa.judge.fingerprints import fingerprints
from pytest_fa.judge.forward_results import with_results
from pytest_fa.judge.gradient_mistakes import explain_gradients
from pytest_fa.judge.gradients import upstream_of
from pytest_fa.judge.output_check import MoreTruth, check_output, check_outputs, require_finite, require_passed
from pytest_fa.judge.own_work import require_own_work
from pytest_fa.judge.properties import PROPERTIES
from pytest_fa.judge.repeats import repeat, require_identical
from pytest_fa.judge.row_outputs import explain_rows
from pytest_fa.judge.subject import JudgedOutput, PropertySubject
from pytest_fa.judge.truth import Truth
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.judge.warm_up import warm_up_of
from pytest_fa.records.checks import Check, CrossCheck, Diagnosis, Fingerprints, Repeats
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.timing import Speed
from pytest_fa.wire.jobs import CaseJob, CaseResult
from pytest_fa.wire.stages import CAUGHT_BY_ENDING, CAUGHT_BY_OUTCOME, ReportProgress, Stages, outcome_of
from pytest_fa.wire.user_traceback import explanation_of, is_wrong_call, lacks_memory, message_of


def run_case(
    job: CaseJob,
    report_progress: ReportProgress = lambda _: None,
    candidate: Candidate | None = None,
    bare: Candidate | None = None,
    truths: TruthStore | None = None,
) -> CaseResult:
    """Load, launch, judge and time one variant on one case.

    `candidate` is where the variant runs; without it, the variant runs in this process.  `bare` is where it runs
    without torch's attention.  `truths` is the judge's store; without it, nothing is kept.  `report_progress` is called
    before each step with the stage and the time limit of that step: by `stages.announce_launch` before a call of the
    variant, by `stages.announce_work` before any other step.  The variant runs before truth is computed, so that memory
    left over from truth cannot contain the right answer.  A variant that fails a check is not timed.  An exception of
    the kernel becomes the outcome of the result.
    """
    stages, findings = Stages(job, report_progress), Findings(truths or TruthStore(0))
    candidate, findings.truths.announce = candidate or Candidate.in_this_process(), stages.announce_work
    stages.limit(candidate)
    device, said = torch.device(job.device), ""
    try:
        with stages("launch"):
            device = open_device(job.device)
            require_unchanged(job.library, job.file_hashes)
            files = FilesOfJob({job.library: job.file_hashes}, (job.variant,))
            meanwhile = warm_up_of(findings.truths, job.case, job.policy, device)
            candidate.open(job.variant, job.library, job.device, job.case.computes, meanwhile=meanwhile)
            findings.is_loaded = True
            arguments = (candidate, job.case, device, job.variant)
            launch = findings.truths.with_memory(lambda: CheckedLaunch.of_case(*arguments))
            first = _first_output(job, launch)
            findings.out, findings.more = launch.dense(first)
        if job.property_name:
            with stages("correct"):
                said = _check_property(job, job.property_name, candidate, findings)
        elif job.checks_output:
            with stages("sanity"):
                _check_sanity(job, launch, first, findings, stages)
            with stages("correct"):
                _check_correct(job, bare, findings, stages)
        if job.time:
            with stages("speed"):
                _time_calls(job, launch, findings, stages)
        candidate.end_job()
        files.require_unchanged()
        return findings.result(Outcome.OK, said, stages)
    except CandidateLost as lost:
        is_of_property = bool(lost.during and job.property_name)
        findings.caught_by = (str(job.property_name),) if is_of_property else CAUGHT_BY_ENDING[lost.ending]
        result = findings.result(lost.ending, str(lost), stages, context_lost=True)
        return msgspec.structs.replace(result, during=lost.during)
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; every exception becomes an outcome
        return _failure(job, problem, candidate, findings, stages)


def _failure(job: CaseJob, problem: Exception, candidate: Candidate, findings: Findings, stages: Stages) -> CaseResult:
    """The result of a job that an exception ended; for a wrong output, with its diagnosis."""
    if isinstance(problem, NoSharing):
        return msgspec.structs.replace(findings.result(Outcome.FAILED, str(problem), stages), lacks_sharing=True)
    device = torch.device(job.device)
    context_alive = not isinstance(problem, DeviceLost) and (job.device == "cpu" or is_alive(device))
    outcome = outcome_of(problem) if context_alive else Outcome.DEVICE_ERROR
    explanation = explanation_of(problem)
    findings.caught_by = _caught_by(outcome, problem, findings)
    if isinstance(problem, WrongResult) and context_alive:
        findings.caught_by = problem.caught_by
        if findings.check and findings.truth and findings.inputs and not isinstance(problem, Tampering):
            # The diagnosis runs other kernels.  If they crash this process, the result of the job is the one sent here.
            result = findings.result(outcome, explanation, stages, context_lost=True)
            stages.announce_work(result_if_crashed=result)
            findings.diagnosis = _diagnose(job, findings, findings.inputs)
            context_alive = job.device == "cpu" or is_alive(device)
    try:
        candidate.end_job()
    except Tampering as proof:  # the process is replaced, also after other exceptions
        context_alive = False
        if problem.args != proof.args:
            outcome, explanation = Outcome.CHEAT, f"{message_of(proof)}; {explanation}"
            findings.caught_by = (*proof.caught_by, *findings.caught_by)
    except Exception:  # noqa: BLE001  # the outcome stands
        context_alive = False
    is_verdict = outcome in (Outcome.WRONG, Outcome.CHEAT)  # which no lack of memory excuses
    findings.lacks_memory = job.device == "cuda" and not is_verdict and lacks_memory(problem)
    return findings.result(outcome, explanation, stages, context_lost=not context_alive)


@dataclasses.dataclass
class Findings:
    """The results of the stages so far.  Each stage sets further fields; no stage reads those of a later stage.

    `truths` computes what outputs are compared with, and keeps it for other jobs if it is the judge's.
    """

    truths: TruthStore
    out: torch.Tensor | None = None  # [batch, heads, seq_q, head_dim or seq_k], the output that `check` describes
    more: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # the further outputs that it returns
    inputs: Inputs | None = None  # of the call that wrote `out`
    truth: Truth | None = None
    more_truths: Mapping[str, MoreTruth] = dataclasses.field(default_factory=dict)  # of further outputs
    check: Check | None = None
    repeats: Repeats | None = None
    # The repeated output that differs most from the first output, or that of the last calls if they agree.
    farthest: Output | None = None
    diagnosis: Diagnosis | None = None
    fingerprints: Fingerprints | None = None
    speed: Speed | None = None
    memory: CallMemory = dataclasses.field(default_factory=CallMemory)
    caught_by: tuple[str, ...] = ()  # the checks that detected a fault
    is_loaded: bool = False  # whether the entry could be loaded
    lacks_memory: bool = False  # whether the memory of the GPU was used up

    # The same fields, for stages that run only after the field was set.

    @property
    def known_out(self) -> torch.Tensor:
        """`out`, which stage `launch` sets."""
        assert self.out is not None  # noqa: S101  # run_case launches before it judges
        return self.out

    @property
    def known_truth(self) -> Truth:
        """`truth`, which stage `sanity` sets."""
        assert self.truth is not None  # noqa: S101  # later stages run only after `sanity`
        return self.truth

    @property
    def known_check(self) -> Check:
        """`check`, which stage `sanity` sets."""
        assert self.check is not None  # noqa: S101  # later stages run only after `sanity`
        return self.check

    def describe(self, judged: JudgedOutput) -> None:
        """Describe an output of another call from now on."""
        self.out, self.more = judged.output
        self.inputs, self.truth, self.check = judged.inputs, judged.truth, judged.check
        self.more_truths = judged.more_truths

    def result(self, outcome: Outcome, message: str, stages: Stages, *, context_lost: bool = False) -> CaseResult:
        """The result of the job: the findings without their tensors, and the state of each stage."""
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
            lacks_memory=self.lacks_memory,
            fingerprints=self.fingerprints,
            compile_seconds=stages.compile_seconds,
            workspace_bytes=self.memory.workspace_bytes,
            peak_bytes=self.memory.peak_bytes,
        )


def _caught_by(outcome: Outcome, problem: Exception, findings: Findings) -> tuple[str, ...]:
    """What detected a fault for which no check ran: the loading of the entry, its first call, or the outcome itself."""
    if isinstance(problem, StoppedJudge):
        return CAUGHT_BY_ENDING[Outcome.FAILED]
    if outcome == Outcome.FAILED and (not findings.is_loaded or (findings.out is None and is_wrong_call(problem))):
        return (ENTRY,)
    return CAUGHT_BY_OUTCOME.get(outcome, ())


# -- launch -----------------------------------------------------------------------------------------------------------


def _first_output(job: CaseJob, launch: CheckedLaunch) -> Output:
    """Make the job's warm-up calls, then return a copy of what the first call after them wrote."""
    for _ in range(job.warm_ups):
        launch.call_and_wait(f"warm_up-{job.slug}")
    return Output(launch.call_and_wait(job.slug), launch.more_buffers).clone()


# -- sanity and correct -----------------------------------------------------------------------------------------------


def _check_sanity(job: CaseJob, launch: CheckedLaunch, first: Output, findings: Findings, stages: Stages) -> None:
    """Check guard bands and delegation, record repeats and memory, judge the output and require it to be finite."""
    findings.inputs = launch.original_inputs
    launch.require_untouched()
    _repeat_call(job, launch, first, findings, stages)
    _check_delegation(job, launch)
    findings.memory = launch.memory()  # not of the first call, which may also take what is kept for all calls
    stages.announce_work()
    data, truths = launch.original_inputs, findings.truths
    own_truth, rounds = job.variant.own_truth, job.variant.reference_rounds
    findings.truth = truths.truth_of(job.case.computes, data, rounds, job.policy, own_truth)
    findings.more_truths = truths.more_truths_of(findings.more, data, job.variant, job.policy)
    findings.check = _check_of_output(findings, job.policy)
    findings.fingerprints = fingerprints(data, findings.known_out)
    require_finite(findings.check)


def _repeat_call(job: CaseJob, launch: CheckedLaunch, first: Output, findings: Findings, stages: Stages) -> None:
    """Repeat the call and record how many outputs differ; `_check_repeats` judges that."""
    if job.repeats != 0:
        findings.repeats, farthest = repeat(
            launch,
            first,
            job.repeats,
            stages.announce_launch,
            keep_farthest=bool(job.variant.may_differ),
            is_further_seed=job.is_further_seed,
        )
        findings.farthest = launch.dense(farthest)
        launch.require_untouched()


def _check_delegation(job: CaseJob, launch: CheckedLaunch) -> None:
    """Require that the variant does not call torch's own attention.  A `cuda` entry cannot, and a baseline may."""
    if job.variant.entry.kind != "cuda" and job.variant.role != "baseline":
        require_no_delegation(launch.operators())


def _check_correct(job: CaseJob, bare: Candidate | None, findings: Findings, stages: Stages) -> None:
    """Require that the output is within its bounds, repeats agree, the variant computes it itself, and limits hold."""
    require_passed(findings.known_check)
    _check_repeats(job, findings)
    _check_own_work(job, bare, findings, stages)
    require_within(findings.memory, job.variant.limits)


def _check_own_work(job: CaseJob, bare: Candidate | None, findings: Findings, stages: Stages) -> None:
    """Require that the variant is right in a process without torch's attention, if there is one."""
    if bare is not None and findings.inputs is not None:
        stages.limit(bare)
        more = findings.more_truths if job.case.computes == "gradients" else {}
        arguments = (job.variant, job.library, job.device, findings.inputs, findings.known_truth, more)
        require_own_work(bare, *arguments, job.policy)
        stages.announce_work()


def _check_repeats(job: CaseJob, findings: Findings) -> None:
    """Require equal repeats of what must not differ; of the rest, judge what differs most."""
    if findings.repeats and not findings.repeats.is_equal:
        require_identical(findings.repeats, job.variant.returns[0], job.variant.may_differ)
        if findings.farthest is not None:
            _check_again(findings.farthest, findings, job.policy, " in a repeat", "repeats")


def _check_property(job: CaseJob, name: str, candidate: Candidate, findings: Findings) -> str:
    """Check one property of the variant, and return what it says of itself.

    Raises if it does not hold.  `findings` then describe the wrong output.
    """
    subject = PropertySubject(job.variant, job.case, job.policy, candidate, findings.truths)
    try:
        return PROPERTIES[name](subject) or ""
    except Tampering:
        raise
    except WrongResult as problem:
        is_about_output = problem.caught_by == (name,)
        if is_about_output and (wrong := subject.wrong or subject.wrong_last_call()) is not None:
            findings.describe(wrong)
        raise


# -- speed ------------------------------------------------------------------------------------------------------------


def _time_calls(job: CaseJob, launch: CheckedLaunch, findings: Findings, stages: Stages) -> None:
    """Time the variant and judge what timed calls wrote.  Sets `findings.speed` only if all of it is right."""
    try:
        speed, written = measure(launch.candidate, job.case, launch.original_inputs)
    except NothingLaunched as problem:
        stages.announce_work()
        if job.checks_output:
            _check_written(problem.written, job, findings)
        raise
    stages.announce_work()
    if job.checks_output:
        _check_written(written, job, findings)
    require_honest_clock(speed, shares_gpu=job.shares_gpu)
    findings.speed = speed


def _check_written(written: list[Written], job: CaseJob, findings: Findings) -> None:
    """Judge what timed calls wrote, each head by the data that its call read.

    If a head is wrong, `findings` describe these heads from then on, as the batches of one case.
    """
    inputs, output = stacked(written)  # of data that no other call has, so its truth is not kept
    truth, more_truths = findings.truths.new_truth_of(job.case.computes, inputs, job.variant, job.policy)
    check = check_outputs(output, truth, more_truths, job.policy)
    if not check.passed:
        findings.inputs, findings.truth, findings.check = inputs, truth, check
        findings.out, findings.more = output
        findings.more_truths = more_truths  # timed calls ask for no log-sum-exp
    require_passed(check, " in an output of the timed calls", "timed outputs")


# -- verdicts ---------------------------------------------------------------------------------------------------------


def _check_of_output(findings: Findings, policy: str) -> Check:
    """The verdict on the outputs that `findings` hold."""
    output = Output(findings.known_out, findings.more)
    return check_outputs(output, findings.known_truth, findings.more_truths, policy)


def _check_again(output: Output, findings: Findings, policy: str, where: str, check_name: str) -> None:
    """Judge `output` and require it to be correct.  `findings` then describe it and no longer the first output.

    `where` is appended to the message of a failure, and `check_name` names the check that then detected it.
    """
    findings.out, findings.more = output
    findings.check = _check_of_output(findings, policy)
    require_passed(findings.check, where, check_name)


def _cause_of_gradients(findings: Findings, inputs: Inputs) -> str:
    """The likely cause of wrong gradients, or of those that differ from call to call; empty if neither is wrong."""
    if findings.known_check.passed:
        if not findings.repeats or findings.repeats.is_equal:
            return ""
        differing = [name for name, count in findings.repeats.of_gradients.items() if count]
        declared = ", ".join(f"{name}: false" for name in differing)
        return (
            f"{' and '.join(differing)} within bounds, but not the same in each call: a race, or atomic additions in "
            f"changing order; if that is meant, write `deterministic: {{{declared}}}`"
        )
    truths = {name: truth for name, truth in findings.more_truths.items() if isinstance(truth, Truth)}
    written = {GRADIENTS[0]: findings.known_out, **findings.more}
    inputs = with_results(inputs)
    return explain_gradients(written, {GRADIENTS[0]: findings.known_truth, **truths}, inputs, upstream_of(inputs))


def _diagnose(job: CaseJob, findings: Findings, inputs: Inputs) -> Diagnosis:
    """Diagnose a wrong output.  If that raises an exception, it is the cause; the verdict and cross-checks stay."""
    out, truth, check = findings.known_out, findings.known_truth, findings.known_check
    cross_checks: tuple[CrossCheck, ...] = ()
    of_rows = findings.more_truths.get(check.only_wrong_rows)
    if isinstance(of_rows, RowTruth):
        part, rows = parts.outputs()[check.only_wrong_rows], findings.more[check.only_wrong_rows]
        return Diagnosis((), "" if check.against else explain_rows(part, rows, of_rows, inputs), (), "")
    try:
        if job.case.computes == "gradients":
            return Diagnosis((), _cause_of_gradients(findings, inputs), (), "")
        repeats, rounds = findings.repeats, job.variant.reference_rounds
        cross_checks = findings.truths.cross_checks(job.cross_checks, inputs, truth, rounds, job.policy)
        state = ""
        if repeats and repeats.later_agree and findings.farthest and job.variant.deterministic:
            later = check_output(findings.farthest.out, truth, job.policy)
            state, repeats = kept_state(repeats, check, later), None
            if check.passed:
                out, check = findings.farthest.out, later
        diagnosis = diagnose(out, truth, inputs, check, repeats, cross_checks, job.case.computes, rounds)
        if not state:
            return diagnosis
        cause = state if check.passed else f"{state}; the wrong output: {diagnosis.cause.removeprefix('wrong ')}"
        return msgspec.structs.replace(diagnosis, cause=cause)
    except Exception as problem:  # noqa: BLE001  # whatever it is, the verdict must not be lost
        concluded = conclusion(cross_checks) if cross_checks else ""
        return Diagnosis((), f"not diagnosed: {message_of(problem)}", cross_checks, concluded)
