"""Paired timing: the arms alternate in one process, in the blocks of `arm_orders`.

A linear drift of the clocks does not change the mean log-ratio of a process.  Each arm has its own buffers and its own
captured graph.  The third arm is the baseline once more; compared with the baseline, it is the A/A control.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.judge.clocks.arm_timer import LONG_CALL_US, ArmTimer
from pytest_fa.records.arm_orders import block_orders, mean_difference, recorded_order, setup_order
from pytest_fa.records.paired import ArmOrder, SamplePlan

LONGEST_SAMPLE = 10  # times the intended length, for the slowest arm on the CPU


class Blocks(NamedTuple):
    """The mean log-ratios of all blocks, and the number of blocks that were dropped."""

    blocks: list[float]  # candidate to baseline
    control: list[float]  # baseline to baseline, the A/A control
    dropped: int  # because the GPU was slowed down
    order: ArmOrder


Arms = tuple[ArmTimer, ArmTimer, ArmTimer]  # the candidate, the baseline, and the baseline once more


def prepare_arms(arms: Arms, seed: int, plan: SamplePlan | None = None) -> SamplePlan:
    """Plan the samples of all arms, capture them in the order that `seed` draws, and take a few that do not count.

    Samples are taken from graphs for all arms, or for none, because the two are not comparable.  With the plan of an
    earlier process, no time is estimated first.  That process may have been disturbed: if a sample is then less than
    half or more than twice as long as intended, all arms are planned anew.  Returns the plan that was used.

    Raises `CannotCapture` if calls shorter than 1 ms cannot be captured: without a graph, their time is the launch's.
    """
    order = setup_order(len(arms), seed)
    ordered = [arms[index] for index in order]
    is_earlier_plan = plan is not None and _follow(arms, order, plan)
    if not is_earlier_plan:
        _find_plan(ordered)
    settled_us = [arm.settle() for arm in ordered]
    if is_earlier_plan and not _are_well_planned(ordered, settled_us):
        _find_plan(ordered)
        for arm in ordered:
            arm.settle()
    calls, is_captured = zip(*(arm.plan for arm in arms), strict=True)
    return SamplePlan(calls, all(is_captured))


def paired_timing(arms: Arms, seed: int, is_slowed: Callable[[], bool] = lambda: False) -> Blocks:
    """Time blocks of the candidate, the baseline and the baseline once more, which is the A/A control.

    `arms` are these three, prepared.  `seed` decides in which order they are sampled.  Afterwards, the arms hold what
    some timed calls wrote.  Blocks during which the GPU was slowed down are dropped.
    """
    result = Blocks([], [], 0, recorded_order(len(arms), seed))
    for order in block_orders(len(arms), seed):
        logs = [math.log(arms[index].sample_us()) for index in order]
        arms[order[0]].drop_sample(-order.count(order[0]))  # the first sample of a block is not used
        if is_slowed():
            result = result._replace(dropped=result.dropped + 1)
            continue
        candidate, baseline, baseline_again = range(len(arms))
        result.blocks.append(mean_difference(order, logs, candidate, baseline))
        result.control.append(mean_difference(order, logs, baseline_again, baseline))
    return result


def _follow(arms: Arms, order: tuple[int, ...], plan: SamplePlan) -> bool:
    """Whether the samples of all arms can be taken as in an earlier process."""
    try:
        for index in order:
            arms[index].follow(plan.calls[index], graph=plan.is_captured)
    except CannotCapture:
        return False
    return True


def _are_well_planned(arms: list[ArmTimer], settled_us: list[float]) -> bool:
    """Whether the samples of all arms have about the length that a new plan would give them."""
    calls_us = _planned_us(arms, settled_us)
    return all(arm.is_well_planned(call_us) for arm, call_us in zip(arms, calls_us, strict=True))


def _find_plan(arms: list[ArmTimer]) -> None:
    """Plan the samples of all arms by the time of a few calls."""
    estimates = [arm.estimate_us() for arm in arms]
    try:
        for arm, estimate_us in zip(arms, estimates, strict=True):
            arm.capture(estimate_us)
    except CannotCapture:
        if not arms[0].is_cpu and min(estimates) < LONG_CALL_US:
            raise  # without a graph, the time of a short kernel is that of its launch
        for arm, estimate_us in zip(arms, _planned_us(arms, estimates), strict=True):
            arm.plan_eager(estimate_us)


def _planned_us(arms: list[ArmTimer], estimates_us: list[float]) -> list[float]:
    """The times per call by which samples without a graph are planned.

    On the CPU, a sample includes the message that starts it.  All arms then make the same number of calls, so that each
    call has the same share of that message.
    """
    if not arms[0].is_cpu:
        return estimates_us
    return [max(min(estimates_us), max(estimates_us) / LONGEST_SAMPLE)] * len(arms)
