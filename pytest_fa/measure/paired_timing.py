"""Two variants in turn, in one process: blocks of ABBA and BAAB, whose log-ratios are free of drift.

Each arm has buffers and a capture of its own.  Beside them the baseline meets itself, as a third arm.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.measure.device_time import CannotCapture, Watch, capture, event_us
from pytest_fa.measure.rotation import Rotation
from pytest_fa.measure.sampling import settle
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import Inputs

BLOCKS = 8
SAMPLE_US = 5000.0
GRAPH_US = 1000.0  # long enough that what a replay itself costs is next to nothing
MOST_CALLS = 1000
LONG_CALL_US = 1000.0

Opened = Callable[[], AbstractContextManager[Forward]]


class Blocks(NamedTuple):
    """Log-ratios of candidate to baseline and of the baseline to itself, and how many blocks were dropped."""

    blocks: list[float]
    control: list[float]
    dropped: int


class ArmTimer:
    """One arm: its buffers, and how a sample of it is taken."""

    def __init__(self, opened: Opened, case: Case, inputs: Inputs, l2_bytes: int | None, watch: Watch) -> None:
        self.rotation = Rotation(case, inputs, l2_bytes)
        self._opened, self._watch, self.is_cpu = opened, watch, inputs.q.device.type == "cpu"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = self._replays = 1
        self.taken_us: list[float] = []

    def estimate_us(self) -> float:
        """Microseconds of a call, after one that pays for what it sets up."""
        self._watch()
        self._eager_us(1)
        self._watch()
        estimate = self._eager_us(1)
        return self._eager_us(10) if estimate < LONG_CALL_US else estimate

    def capture(self, estimate_us: float) -> None:
        """Take samples from a graph from now on.  Raises `CannotCapture`."""
        if self.is_cpu:
            raise CannotCapture("it runs on the CPU")
        calls = 20 if estimate_us < LONG_CALL_US else 1
        with self._opened() as forward:
            probe = capture(lambda: self.rotation.call(forward), calls, self.rotation.begin)
            probe.replay()
            device_us = event_us(probe.replay, 3) / (3 * calls)
            self._calls = max(1, min(MOST_CALLS, math.ceil(GRAPH_US / device_us)))
            self._graph = capture(lambda: self.rotation.call(forward), self._calls, self.rotation.begin)
        self._replays = max(1, math.ceil(SAMPLE_US / (device_us * self._calls)))

    def plan_eager(self, estimate_us: float) -> None:
        """Take samples from plain calls."""
        self._graph, self._replays = None, 1
        self._calls = max(1, min(MOST_CALLS, math.ceil(SAMPLE_US / max(estimate_us, 0.1))))

    @property
    def method(self) -> str:
        """How a sample is taken."""
        if self._graph is not None:
            return f"{self._replays} replays of a graph of {self._calls} calls"
        return f"{'wall clock of' if self.is_cpu else 'event pair around'} {self._calls} calls"

    def sample_us(self) -> float:
        """One sample, microseconds per call; it is also kept.

        Replays once untimed before it, so that whoever ran before leaves the same behind for every arm.
        """
        self._watch()
        if self._graph is None:
            found = self._eager_us(self._calls)
        else:
            self._graph.replay()
            found = event_us(self._graph.replay, self._replays) / (self._calls * self._replays)
        self.taken_us.append(found)
        return found

    def _eager_us(self, calls: int) -> float:
        with self._opened() as forward:
            if not self.is_cpu:
                return event_us(lambda: self.rotation.call(forward), calls) / calls
            start = time.perf_counter_ns()
            for _ in range(calls):
                self.rotation.call(forward)
            return (time.perf_counter_ns() - start) / 1000 / calls


def paired_timing(
    arms: tuple[ArmTimer, ArmTimer, ArmTimer],
    seed: int,
    is_slowed: Callable[[], bool] = lambda: False,
    blocks: int = BLOCKS,
) -> Blocks:
    """Blocks of the candidate against the baseline, and of the baseline against itself, in turn.

    `arms` are the candidate, the baseline, and the baseline once more.  `seed` draws the order of capture and who
    begins.  Builds outputs of timed calls in the arms' rotations.  Raises `CannotCapture` where short calls cannot be
    captured: by their launches they are not to be compared.
    """
    draw = random.Random(seed)  # noqa: S311  # no secret
    _prepare(draw.sample(arms, len(arms)))
    candidate, baseline, twin = arms
    first = draw.randrange(2)
    found = Blocks([], [], 0)
    dropped = 0
    for index in range(blocks):
        turned = (index + first) % 2 == 1
        pair, control = _block(candidate, baseline, turned=turned), _block(twin, baseline, turned=turned)
        if is_slowed():
            dropped += 1
            continue
        found.blocks.append(pair)
        found.control.append(control)
    return found._replace(dropped=dropped)


def _prepare(arms: list[ArmTimer]) -> None:
    """All by graphs, or none: a graph's period and a plain call's are not the same figure."""
    estimates = [each.estimate_us() for each in arms]
    try:
        for each, estimate_us in zip(arms, estimates, strict=True):
            each.capture(estimate_us)
    except CannotCapture:
        if not arms[0].is_cpu and min(estimates) < LONG_CALL_US:
            raise  # plain calls of short kernels are as long as their launches
        for each, estimate_us in zip(arms, estimates, strict=True):
            each.plan_eager(estimate_us)
    for each in arms:
        settle(each.sample_us)
        each.taken_us.clear()
        each.rotation.flip()
        each.rotation.poison()


def _block(mine: ArmTimer, other: ArmTimer, *, turned: bool) -> float:
    """One block: mine, other, other, mine, or with both exchanged; the mean log-ratio of mine to other."""
    order = (other, mine, mine, other) if turned else (mine, other, other, mine)
    logs = [math.log(each.sample_us()) * (1 if each is mine else -1) for each in order]
    return sum(logs) / 2
