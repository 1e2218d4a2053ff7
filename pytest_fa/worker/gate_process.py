"""`run_gate` runs one process of a gate: the paired timing of every candidate with its baseline."""

from __future__ import annotations

import statistics
from contextlib import nullcontext

import torch

from pytest_fa.build.unchanged import require_unchanged
from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.variant import Tolerance
from pytest_fa.errors import DeviceLost, WrongResult
from pytest_fa.judge.check import judge, require_output
from pytest_fa.judge.oracle import truth_of
from pytest_fa.measure.arm_orders import setup_order
from pytest_fa.measure.attached import require_no_tool
from pytest_fa.measure.cpu_time import fixed_cpu_threads
from pytest_fa.measure.device_time import CannotCapture
from pytest_fa.measure.measure import l2_bytes
from pytest_fa.measure.paired_timing import ArmTimer, Blocks, OpenForward, paired_timing
from pytest_fa.records.environment import clock_watch
from pytest_fa.records.record import Outcome
from pytest_fa.run.device import is_alive, open_device
from pytest_fa.run.inputs import Inputs, make_inputs
from pytest_fa.run.module import load_forward, open_forward
from pytest_fa.worker.jobs import Arm, GateJob, GateResult, PairBlocks
from pytest_fa.worker.stages import ReportProgress, Stages, outcome_of
from pytest_fa.worker.user_traceback import explanation_of


def run_gate(job: GateJob, report_progress: ReportProgress = lambda _: None) -> GateResult:
    """Time every arm pair of the job, and check the outputs of the timed calls.

    An exception of a kernel is not raised: it becomes the outcome of the result.
    """
    device, measured = torch.device(job.device), []
    stages = Stages(job, report_progress)
    try:
        stages.announce_work()
        require_no_tool()
        open_device(job.device)
        with clock_watch(job.device) as clocks:
            for index, pair in enumerate(job.arm_pairs):
                inputs = make_inputs(pair.case, device)
                l2 = l2_bytes(device)
                arms = (pair.candidate, pair.baseline, pair.baseline)  # the third arm is the A/A control
                timer_of = {
                    place: ArmTimer(_opener(arms[place]), pair.case, inputs, l2, stages.announce_launch)
                    for place in setup_order(len(arms), job.seed + index)  # the order in which buffers are allocated
                }
                timers = [timer_of[place] for place in range(len(arms))]
                with fixed_cpu_threads(device):
                    blocks = paired_timing((timers[0], timers[1], timers[2]), job.seed + index, clocks.is_slowed)
                stages.announce_work()
                _judge_timed_outputs(timers, arms, pair.case.computes, inputs, job.policy)
                measured.append(_pair_blocks(blocks, timers))
        return GateResult("ok", "", tuple(measured))
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; every exception becomes an outcome
        context_alive = job.device == "cpu" or (not isinstance(problem, DeviceLost) and is_alive(device))
        outcome: Outcome = "inconclusive" if isinstance(problem, CannotCapture) else outcome_of(problem)
        if not context_alive:
            outcome = "device_error"
        return GateResult(outcome, explanation_of(problem), (), context_lost=not context_alive)


def _pair_blocks(blocks: Blocks, timers: list[ArmTimer]) -> PairBlocks:
    candidate_us, baseline_us, _ = (statistics.median(timer.samples_us) for timer in timers)
    log_ratios = (tuple(blocks.blocks), tuple(blocks.control))
    return PairBlocks(*log_ratios, blocks.dropped, candidate_us, baseline_us, timers[0].method, blocks.order)


def _opener(arm: Arm) -> OpenForward:
    """A function that opens the arm's callable and enters the manifest's `context` each time.

    A library is loaded only once.  Raises `ChangedBuild` if it is not the one that was built.
    """
    require_unchanged(arm.library, arm.file_hashes)
    if arm.variant.entry.context:
        return lambda: open_forward(arm.variant, arm.library)
    forward = load_forward(arm.variant, arm.library)
    return lambda: nullcontext(forward)


def _judge_timed_outputs(
    timers: list[ArmTimer], arms: tuple[Arm, ...], computes: Computes, inputs: Inputs, policy: Tolerance
) -> None:
    """Require every output of the timed calls to be correct, so that a kernel that skips work cannot win.

    `policy` judges the candidate, which is the first arm.  A baseline is judged by its own manifest's policy.
    """
    for timer, arm in zip(timers, arms, strict=True):
        arm_policy = policy if arm is arms[0] else arm.variant.tolerance
        truth = truth_of(computes, inputs, arm.variant.rounds, arm_policy)
        for out in timer.rotation.outputs:
            check = judge(require_output(out, timer.rotation.out_buffers[0]), truth, arm_policy)
            if not check.passed:
                message = f"{arm.variant.name}: {check.complaint} in an output of the gate's timed calls"
                raise WrongResult("timed outputs", message)
        timer.rotation.require_untouched()
