"""Paired timing: two variants alternate in one process, in blocks of ABBA and BAAB.

The mean log-ratio of a block does not change under a linear drift of the clocks.  Each arm has its own buffers and its
own captured graph.  A third arm is the baseline once more; its blocks against the baseline are the A/A control.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from pytest_fa.measure.arm_timer import LONG_CALL_US, ArmTimer
from pytest_fa.run.graphs import CannotCapture

BLOCKS = 8


class Blocks(NamedTuple):
    """The mean log-ratios of all blocks, and the number of blocks that were dropped."""

    blocks: list[float]  # candidate to baseline
    control: list[float]  # baseline to baseline, the A/A control
    dropped: int  # because the GPU was slowed down


def paired_timing(
    arms: tuple[ArmTimer, ArmTimer, ArmTimer],
    seed: int,
    is_slowed: Callable[[], bool] = lambda: False,
    blocks: int = BLOCKS,
) -> Blocks:
    """Time blocks of the candidate against the baseline, and of the baseline against itself, alternately.

    `arms` are the candidate, the baseline, and the baseline once more.  `seed` decides the order in which arms are
    captured and which arm begins the first block.  Afterwards, the arms hold what some timed calls wrote.
    Blocks during which the GPU was slowed down are dropped.

    Raises `CannotCapture` if calls shorter than 1 ms cannot be captured: without a graph, their time is the launch's.
    """
    generator = random.Random(seed)  # noqa: S311  # not for cryptography
    _prepare(generator.sample(arms, len(arms)))
    candidate, baseline, baseline_again = arms
    first = generator.randrange(2)
    result = Blocks([], [], 0)
    dropped = 0
    for index in range(blocks):
        baseline_first = (index + first) % 2 == 1
        pair = _block(candidate, baseline, b_first=baseline_first)
        control = _block(baseline_again, baseline, b_first=baseline_first)
        if is_slowed():
            dropped += 1
            continue
        result.blocks.append(pair)
        result.control.append(control)
    return result._replace(dropped=dropped)


def _prepare(arms: list[ArmTimer]) -> None:
    """Plan the samples of all arms: from graphs for all of them, or for none, because the two are not comparable.

    Then take a few samples that do not count.
    """
    estimates = [arm.estimate_us() for arm in arms]
    try:
        for arm, estimate_us in zip(arms, estimates, strict=True):
            arm.capture(estimate_us)
    except CannotCapture:
        if not arms[0].is_cpu and min(estimates) < LONG_CALL_US:
            raise  # without a graph, the time of a short kernel is that of its launch
        for arm, estimate_us in zip(arms, estimates, strict=True):
            arm.plan_eager(estimate_us)
    for arm in arms:
        arm.settle()


def _block(a: ArmTimer, b: ArmTimer, *, b_first: bool) -> float:
    """Time one block, ABBA or with `b_first` BAAB, and return the mean of log(a / b)."""
    order = (b, a, a, b) if b_first else (a, b, b, a)
    logs = [math.log(arm.sample_us()) * (1 if arm is a else -1) for arm in order]
    return sum(logs) / 2
