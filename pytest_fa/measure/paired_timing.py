"""Paired timing: the arms alternate in one process, in the blocks of `arm_orders`.

A linear drift of the clocks does not change the mean log-ratio of a process.  Each arm has its own buffers and its own
captured graph.  The third arm is the baseline once more; compared with the baseline, it is the A/A control.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.measure.arm_orders import block_orders, mean_difference, recorded_order, setup_order
from pytest_fa.measure.device_time import BeforeLaunch, CannotCapture, capture, event_us
from pytest_fa.measure.rotation import Rotation
from pytest_fa.measure.sampling import settle
from pytest_fa.records.gated import ArmOrder
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import Inputs

SAMPLE_US = 5000.0  # the least length of a sample
GRAPH_US = 1000.0  # the intended length of a graph, at which the cost of a replay is negligible
MOST_CALLS = 1000  # in a graph
LONG_CALL_US = 1000.0  # from this length on, graphs have one call and calls may be timed without a graph

OpenForward = Callable[[], AbstractContextManager[Forward]]  # opens a variant's callable in its manifest's context


class Blocks(NamedTuple):
    """The mean log-ratios of all blocks, and the number of blocks that were dropped."""

    blocks: list[float]  # candidate to baseline
    control: list[float]  # baseline to baseline, the A/A control
    dropped: int  # because the GPU was slowed down
    order: ArmOrder


class ArmTimer:
    """One arm of paired timing: a variant, its buffers, and the way to take a sample of its time.

    `before_launch` is called before work that may hang.
    """

    def __init__(
        self, open_forward: OpenForward, case: Case, inputs: Inputs, l2_bytes: int | None, before_launch: BeforeLaunch
    ) -> None:
        self.rotation = Rotation(case, inputs, l2_bytes)
        self._open_forward, self._before_launch, self.is_cpu = (
            open_forward,
            before_launch,
            inputs.q.device.type == "cpu",
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = self._replays = 1
        self.samples_us: list[float] = []

    def estimate_us(self) -> float:
        """Estimate the microseconds per call, after one call that does the set-up."""
        self._before_launch()
        self._eager_us(1)
        self._before_launch()
        estimate = self._eager_us(1)
        return self._eager_us(10) if estimate < LONG_CALL_US else estimate

    def capture(self, estimate_us: float) -> None:
        """Capture a graph, from which samples are taken from now on.  Raises `CannotCapture`."""
        if self.is_cpu:
            raise CannotCapture("it runs on the CPU")
        calls = 20 if estimate_us < LONG_CALL_US else 1
        with self._open_forward() as forward:
            probe = capture(lambda: self.rotation.call(forward), calls, self.rotation.begin)
            probe.replay()
            device_us = event_us(probe.replay, 3) / (3 * calls)
            self._calls = max(1, min(MOST_CALLS, math.ceil(GRAPH_US / device_us)))
            self._graph = capture(lambda: self.rotation.call(forward), self._calls, self.rotation.begin)
        self._replays = max(1, math.ceil(SAMPLE_US / (device_us * self._calls)))

    def plan_eager(self, estimate_us: float) -> None:
        """Take samples from calls without a graph from now on."""
        self._graph, self._replays = None, 1
        self._calls = max(1, min(MOST_CALLS, math.ceil(SAMPLE_US / max(estimate_us, 0.1))))

    @property
    def method(self) -> str:
        """A description of how a sample is taken, for records."""
        if self._graph is not None:
            return f"{self._replays} replays of a graph of {self._calls} calls"
        return f"{'wall clock of' if self.is_cpu else 'event pair around'} {self._calls} calls"

    def sample_us(self) -> float:
        """Take one sample, in microseconds per call, and append it to `samples_us`.

        A graph is replayed once untimed before the sample, so that every sample starts after a replay of its own arm.
        """
        self._before_launch()
        if self._graph is None:
            sample = self._eager_us(self._calls)
        else:
            self._graph.replay()
            sample = event_us(self._graph.replay, self._replays) / (self._calls * self._replays)
        self.samples_us.append(sample)
        return sample

    def _eager_us(self, calls: int) -> float:
        """Microseconds per call of `calls` calls without a graph."""
        with self._open_forward() as forward:
            if not self.is_cpu:
                return event_us(lambda: self.rotation.call(forward), calls) / calls
            start = time.perf_counter_ns()
            for _ in range(calls):
                self.rotation.call(forward)
            return (time.perf_counter_ns() - start) / 1000 / calls


def paired_timing(
    arms: tuple[ArmTimer, ArmTimer, ArmTimer], seed: int, is_slowed: Callable[[], bool] = lambda: False
) -> Blocks:
    """Time blocks of the candidate, the baseline and the baseline once more, which is the A/A control.

    `arms` are these three.  `seed` decides in which order they are captured and sampled.  Afterwards, the arms'
    rotations hold the outputs of timed calls.  Blocks during which the GPU was slowed down are dropped.

    Raises `CannotCapture` if calls shorter than 1 ms cannot be captured: without a graph, their time is the launch's.
    """
    _prepare([arms[index] for index in setup_order(len(arms), seed)])
    result = Blocks([], [], 0, recorded_order(len(arms), seed))
    for order in block_orders(len(arms), seed):
        logs = [math.log(arms[index].sample_us()) for index in order]
        arms[order[0]].samples_us.pop(-order.count(order[0]))  # the first sample of a block is not used
        if is_slowed():
            result = result._replace(dropped=result.dropped + 1)
            continue
        candidate, baseline, baseline_again = range(len(arms))
        result.blocks.append(mean_difference(order, logs, candidate, baseline))
        result.control.append(mean_difference(order, logs, baseline_again, baseline))
    return result


def _prepare(arms: list[ArmTimer]) -> None:
    """Plan the samples of all arms: from graphs for all of them, or for none, because the two are not comparable.

    Then take samples until they have settled, drop them, flip the sign of V and poison the outputs.
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
        settle(arm.sample_us)
        arm.samples_us.clear()
        arm.rotation.flip()
        arm.rotation.poison()
