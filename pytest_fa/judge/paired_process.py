"""`run_paired` times every candidate beside its baseline, in one of the processes of a question.

It is the judge's.  Candidate, baseline and the baseline's twin run in processes of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from pytest_fa.attention.scores import Computes
from pytest_fa.build.unchanged import FilesOfJob, require_unchanged
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Tolerance, tolerance_for
from pytest_fa.errors import DeviceLost, WrongResult
from pytest_fa.gpu.device import is_alive, open_device
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.arm_timer import ArmTimer
from pytest_fa.judge.clocks.attached import require_no_tool
from pytest_fa.judge.clocks.fresh_data import stacked
from pytest_fa.judge.clocks.measure import l2_bytes
from pytest_fa.judge.clocks.paired_timing import Arms, Blocks, paired_timing, prepare_arms
from pytest_fa.judge.connection import CandidateLost
from pytest_fa.judge.output_check import check_outputs
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.records.arm_orders import setup_order
from pytest_fa.records.environment import clock_monitor
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import SamplePlan
from pytest_fa.wire.jobs import Arm, ArmPair, PairBlocks, PairedJob, PairedResult, is_built_in
from pytest_fa.wire.part_clock import PartClock
from pytest_fa.wire.stages import ReportProgress, Stages, outcome_of
from pytest_fa.wire.user_traceback import explanation_of

DISTURBED = ". Other processes use this GPU and may have delayed one of the clocks: end them, and run it again"
ARMS = 3  # the candidate, the baseline, and the baseline once more, which is the A/A control


def run_paired(
    job: PairedJob,
    report_progress: ReportProgress = lambda _: None,
    candidates: list[Candidate] | None = None,
    truths: TruthStore | None = None,
) -> PairedResult:
    """Time every arm pair of the job, and check what timed calls wrote.

    `candidates` are where the three arms run; without them, all run in this process.  `truths` is the judge's store; a
    pair does not use what it keeps, but may need its memory.  An exception of a kernel is not raised: it becomes the
    outcome of the result.
    """
    device, stages, truths = torch.device(job.device), Stages(job, report_progress), truths or TruthStore(0)
    truths.announce = stages.announce_work
    candidates, clock = candidates or [Candidate.in_this_process() for _ in range(ARMS)], PartClock()
    try:
        stages.announce_work()
        require_no_tool()
        open_device(job.device)
        with clock("files"):
            files = _files_of(job)
        for candidate in candidates:
            stages.limit(candidate)
        with clock_monitor(job.device) as clocks:
            measured = [
                _time_pair(job, index, candidates, clocks.is_slowed, stages, truths, clock)
                for index in range(len(job.arm_pairs))
            ]
        with clock("files"):
            files.require_unchanged()
        return PairedResult(Outcome.OK, "", tuple(measured), seconds=clock.seconds)
    except CandidateLost as lost:
        return PairedResult(lost.ending, str(lost), (), context_lost=True)
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; every exception becomes an outcome
        context_alive = not isinstance(problem, DeviceLost) and (job.device == "cpu" or is_alive(device))
        outcome, message = _ending(problem, job)
        if not context_alive:
            outcome = Outcome.DEVICE_ERROR
        return PairedResult(outcome, message, (), context_lost=not context_alive)


def _ending(problem: Exception, job: PairedJob) -> tuple[Outcome, str]:
    """The outcome that an exception becomes, and its message."""
    message = explanation_of(problem)
    if job.shares_gpu and isinstance(problem, WrongResult) and problem.caught_by == ("clocks",):
        return Outcome.INCONCLUSIVE, message + DISTURBED
    return Outcome.INCONCLUSIVE if isinstance(problem, CannotCapture) else outcome_of(problem), message


def _files_of(job: PairedJob) -> FilesOfJob:
    arms = [arm for pair in job.arm_pairs for arm in (pair.candidate, pair.baseline)]
    return FilesOfJob({arm.library: arm.file_hashes for arm in arms}, tuple(arm.variant for arm in arms))


def _time_pair(  # what one pair of a job needs
    job: PairedJob,
    index: int,
    candidates: list[Candidate],
    is_slowed: Callable[[], bool],
    stages: Stages,
    truths: TruthStore,
    clock: PartClock,
) -> PairBlocks:
    pair, seed = job.arm_pairs[index], job.seed + index
    arms = (pair.candidate, pair.baseline, pair.baseline)
    with clock("open"):
        _open_together(list(zip(candidates, arms, strict=True)), job, pair.case)
    with clock("buffers"):
        timers = _timers(pair, arms, candidates, seed, truths)
    with clock("capture"):
        plan = prepare_arms(timers, seed, job.plans[index] if job.plans else None)
    with clock("samples"):
        blocks = paired_timing(timers, seed, is_slowed)
    stages.announce_work()
    for timer, arm in zip(timers, arms, strict=True):
        timer.require_one_time()
        if not job.plans or timer is timers[0] or not is_built_in(arm.variant):
            with clock("proof"):
                timer.prove()
        stages.announce_work()
        tolerance = job.policy if arm is pair.candidate else arm.variant.tolerance
        with clock("check"):
            _check_written(timer, arm, pair.case.computes, tolerance_for(tolerance, pair.case.dtype), truths)
    with clock("check"):
        for candidate in candidates:
            candidate.end_job()
    return _pair_blocks(blocks, timers, plan)


def _open_together(openings: list[tuple[Candidate, Arm]], job: PairedJob, case: Case) -> None:
    """Let all processes open the device and load their variants at the same time; none of them is timed yet.

    If one fails, the others finish loading before its exception is raised.  Their processes are ended then.  A process
    that ends while it compiles or loads an extension does not remove the lock file of that extension.
    """
    if failures := _failures_of(openings, job, case):
        raise failures[0]


def _failures_of(openings: list[tuple[Candidate, Arm]], job: PairedJob, case: Case) -> list[Exception]:
    """Why arms could not be opened, in the order of the arms.  Each is sent its command before the next is waited for.

    After a command that cannot be sent, no other is.
    """
    if not openings:
        return []
    (candidate, arm), *others = openings
    failures: list[Exception] = []

    def open_others() -> None:
        failures.extend(_failures_of(others, job, case))

    try:
        require_unchanged(arm.library, arm.file_hashes)
        candidate.open(arm.variant, arm.library, job.device, case.computes, tools=False, meanwhile=open_others)
    except Exception as problem:  # noqa: BLE001  # a variant may raise anything; it is raised again
        failures.insert(0, problem)
    return failures


def _timers(
    pair: ArmPair, arms: tuple[Arm, Arm, Arm], candidates: list[Candidate], seed: int, truths: TruthStore
) -> Arms:
    """The timers of three arms.  Their buffers are allocated in the order that `seed` draws."""
    device = candidates[0].device
    inputs, l2 = truths.with_memory(lambda: make_inputs(pair.case, device)), l2_bytes(device)
    timer_of = {
        place: ArmTimer(
            arms[place].variant.name,
            candidates[place],
            pair.case,
            inputs.in_conventions(arms[place].variant.conventions),
            l2,
        )
        for place in setup_order(len(arms), seed)
    }
    return timer_of[0], timer_of[1], timer_of[2]


def _pair_blocks(blocks: Blocks, timers: Arms, plan: SamplePlan) -> PairBlocks:
    candidate_us, baseline_us, _ = (statistics.median(timer.samples_us) for timer in timers)
    outside_us = tuple(statistics.median(timer.outside_us) for timer in timers[:2])
    log_ratios = (tuple(blocks.blocks), tuple(blocks.control))
    times_us = (candidate_us, baseline_us)
    clocks_us = (outside_us[0], outside_us[1])
    nodes = (timers[0].nodes, timers[1].nodes)
    return PairBlocks(*log_ratios, blocks.dropped, *times_us, timers[0].method, blocks.order, clocks_us, plan, nodes)


def _check_written(timer: ArmTimer, arm: Arm, computes: Computes, policy: Tolerance, truths: TruthStore) -> None:
    """Require what timed calls wrote to be right, so that a kernel that skips work cannot win.

    The candidate is judged by the job's policy, a baseline by its own manifest's; neither by `fp8` on other inputs.
    """
    inputs, output = stacked(timer.written)
    truth, more = truths.new_truth_of(computes, inputs, arm.variant, policy)
    check = check_outputs(output, truth, more, policy)
    if not check.passed:
        message = f"{arm.variant.name}: {check.complaint} in an output of the timed calls"
        raise WrongResult("timed outputs", message)
