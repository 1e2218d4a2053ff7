"""`run_gate`: one process of a gate, in which two variants take turns."""

from __future__ import annotations

import statistics
from contextlib import nullcontext

import torch

from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.variant import Tolerance
from pytest_fa.errors import DeviceLost, WrongResult
from pytest_fa.judge.check import judge, require_output
from pytest_fa.judge.oracle import truth_of
from pytest_fa.measure.attached import require_no_tool
from pytest_fa.measure.device_time import CannotCapture
from pytest_fa.measure.measure import l2_bytes
from pytest_fa.measure.paired_timing import ArmTimer, Blocks, Opened, paired_timing
from pytest_fa.records.environment import clock_watch
from pytest_fa.records.record import Outcome
from pytest_fa.run.device import is_alive, open_device
from pytest_fa.run.inputs import Inputs, make_inputs
from pytest_fa.run.module import load_forward, open_forward
from pytest_fa.worker.jobs import Arm, GateJob, GateResult, PairBlocks
from pytest_fa.worker.stages import Stages, Tell, message_of, outcome_of


def run_gate(job: GateJob, tell: Tell = lambda _: None) -> GateResult:
    """One process of a gate: every contest measured, and what its timed calls gave judged.

    Never raises for what a kernel does.
    """
    device, found = torch.device(job.device), []
    stages = Stages(job, tell)
    try:
        stages.wait()
        require_no_tool()
        open_device(job.device)
        with clock_watch(job.device) as clocks:
            for index, each in enumerate(job.arm_pairs):
                inputs = make_inputs(each.case, device)
                l2 = l2_bytes(device)
                sides = (each.candidate, each.baseline, each.baseline)
                arms = [ArmTimer(_opener(arm), each.case, inputs, l2, stages.watch) for arm in sides]
                blocks = paired_timing((arms[0], arms[1], arms[2]), job.seed + index, clocks.is_slowed)
                stages.wait()
                _judge_arms(arms, sides, each.case.computes, inputs, job.policy)
                found.append(_pair_blocks(blocks, arms))
        return GateResult("ok", "", tuple(found))
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything; each becomes a named outcome
        alive = job.device == "cpu" or (not isinstance(problem, DeviceLost) and is_alive(device))
        outcome: Outcome = "inconclusive" if isinstance(problem, CannotCapture) else outcome_of(problem)
        return GateResult(outcome if alive else "device_error", message_of(problem), (), context_lost=not alive)


def _pair_blocks(blocks: Blocks, arms: list[ArmTimer]) -> PairBlocks:
    candidate, baseline, _ = (statistics.median(each.taken_us) for each in arms)
    rows = (tuple(blocks.blocks), tuple(blocks.control))
    return PairBlocks(*rows, blocks.dropped, candidate, baseline, arms[0].method)


def _opener(arm: Arm) -> Opened:
    """The arm's callable in its context, anew for every time that it is entered; a library is loaded once."""
    if arm.variant.entry.context:
        return lambda: open_forward(arm.variant, arm.library)
    forward = load_forward(arm.variant, arm.library)
    return lambda: nullcontext(forward)


def _judge_arms(
    arms: list[ArmTimer], sides: tuple[Arm, ...], computes: Computes, inputs: Inputs, policy: Tolerance
) -> None:
    """Every output that a timed call left is right: what computes nothing is fast."""
    for arm, side in zip(arms, sides, strict=True):
        each_policy = policy if side is sides[0] else side.variant.tolerance
        truth = truth_of(computes, inputs, side.variant.rounds, each_policy)
        for out in arm.rotation.outputs:
            check = judge(require_output(out, arm.rotation.given[0]), truth, each_policy)
            if not check.passed:
                raise WrongResult("timed outputs", f"{side.variant.name}: {check.complaint} in an output of the gate")
        arm.rotation.require_untouched()
