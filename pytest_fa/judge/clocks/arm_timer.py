"""One arm of paired timing: a candidate in a process of its own, its buffers, and the way to take a sample."""

from __future__ import annotations

import math
import secrets
import statistics

from pytest_fa.catalog.case import Case
from pytest_fa.errors import Tampering, WrongResult
from pytest_fa.gpu.graphs import CannotCapture
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.device_time import proof_calls, shorter_us
from pytest_fa.judge.clocks.fresh_data import FreshData, Written
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.records.agreement import PROVEN_SHARE, SHARED_OUTPUT, proof_limit_us
from pytest_fa.records.paired import CPU_METHOD
from pytest_fa.records.timing import CallNodes, message_limit_us

SAMPLE_US = 10_000.0  # the intended length of a sample on a GPU: one replay of a graph
CPU_SAMPLE_US = 20_000.0
MAX_CALLS = 6000  # in a graph
MAX_CPU_CALLS = 200
LONG_CALL_US = 1000.0  # from this length on, calls may be timed without a graph
PROBE_CALLS = 20
HEADS_JUDGED = 16  # of an arm's timed calls
CLOCK_SHARE = 0.05  # how much longer the judge's clock may be besides
SETTLING_SAMPLES = 5
MAX_TIMES_OFF = 2.0  # a sample that is longer or shorter by more than this factor than intended is planned anew


class ArmTimer:
    """Takes samples of one arm; each has data of its own."""

    def __init__(self, name: str, candidate: Candidate, case: Case, inputs: Inputs, l2_bytes: int | None) -> None:
        self.name, self._candidate = name, candidate
        self.is_cpu = candidate.device.type == "cpu"
        self._data = FreshData(candidate, case, inputs, l2_bytes)
        self._message_us = message_limit_us(self._data.publish_us, self._data.outputs_of_call)
        self._calls, self._graph = 1, False
        self._series: TimedSeries | None = None
        self.samples_us: list[float] = []
        self.outside_us: list[float] = []
        self.written: list[Written] = []

    def estimate_us(self) -> float:
        """Estimate the microseconds per call, after one call that does the set-up."""
        self._prepare(PROBE_CALLS, graph=False)
        self._time(1)
        estimate = self._time(1)
        return self._time(10) if estimate < LONG_CALL_US else estimate

    def capture(self, estimate_us: float) -> None:
        """Take samples from a graph from now on.  Raises `CannotCapture`."""
        if self.is_cpu:
            raise CannotCapture("it runs on the CPU")
        calls = PROBE_CALLS if estimate_us < LONG_CALL_US else 1
        self._prepare(calls, graph=True)
        self._time(calls)
        device_us = self._time(calls)
        self._prepare(self._calls_of_sample(device_us), graph=True)

    def follow(self, calls: int, *, graph: bool) -> None:
        """Take samples of `calls` calls from now on, as an earlier process did.  Raises `CannotCapture`."""
        self._prepare(calls, graph=graph)

    def plan_eager(self, estimate_us: float) -> None:
        """Take samples from calls without a graph from now on."""
        self._prepare(self._calls_of_sample(estimate_us), graph=False)

    def is_well_planned(self, call_us: float) -> bool:
        """Whether samples have about the intended length if a call takes `call_us`, or as nearly as they can."""
        share = self._calls * call_us / self._intended_us
        return 1 / MAX_TIMES_OFF <= share <= MAX_TIMES_OFF or self._calls == self._calls_of_sample(call_us)

    @property
    def plan(self) -> tuple[int, bool]:
        """The calls of a sample, and whether they are captured."""
        return self._calls, self._graph

    @property
    def method(self) -> str:
        """A description of how a sample is taken, for records."""
        if self._graph:
            return f"one replay of a graph of {self._calls} calls, each on its own data"
        return f"{CPU_METHOD if self.is_cpu else 'event pair around'} {self._calls} calls, each on its own data"

    def settle(self) -> float:
        """Take samples that do not count: clocks ramp up, and caches fill.  Returns the median time of a call."""
        median_us = statistics.median(self.sample_us() for _ in range(SETTLING_SAMPLES))
        self.samples_us.clear()
        self.outside_us.clear()
        self.written.clear()
        return median_us

    def sample_us(self) -> float:
        """Take one sample, in microseconds per call, and keep it; of some samples, keep also what a call wrote."""
        sample = self._time(self._calls, keep=True)
        self._keep(self._known_series.written_head())
        self._data.require_untouched()
        self.samples_us.append(sample)
        return sample

    def drop_sample(self, index: int) -> None:
        """Drop a sample, which both clocks timed."""
        del self.samples_us[index], self.outside_us[index]

    def _keep(self, written: Written) -> None:
        """Keep what a call of each sample wrote, and of many samples a choice that no candidate knows."""
        place = len(self.written) if len(self.written) < HEADS_JUDGED else secrets.randbelow(len(self.samples_us) + 1)
        self.written[place : place + 1] = [written] if place < HEADS_JUDGED else []

    def require_one_time(self) -> None:
        """Raise `WrongResult` if the candidate's clock shows clearly less than the judge's.

        From 25 % on, it is proof of tampering.  On the CPU, samples are by the judge's clock.
        """
        _require_own_outputs(self.name, self._known_series)
        if self.is_cpu:
            return
        inside_us, outside_us = (statistics.median(samples) for samples in (self.samples_us, self.outside_us))
        allowed_us = inside_us * (1 + CLOCK_SHARE) + self._message_us / self._calls
        if outside_us > allowed_us:
            is_proof = inside_us < (1 - PROVEN_SHARE) * (outside_us - self._message_us / self._calls)
            raise (Tampering if is_proof else WrongResult)(
                "clocks",
                f"{self.name}: a call takes {inside_us:.2f} us by the clock of its own process and {outside_us:.2f} us "
                f"by the judge's; at most {allowed_us:.2f} us are allowed",
            )

    def prove(self) -> None:
        """Time calls that write an output of their own each, and keep what some of them wrote.

        Raises `WrongResult` if they take clearly longer: then work was skipped whose result another call overwrites.
        On the CPU every call has an output of its own anyway.
        """
        if not self._graph:
            return
        inside_us, outside_us = (statistics.median(samples) for samples in (self.samples_us, self.outside_us))
        call_us, run_us = min(inside_us, outside_us), self._calls * (outside_us - inside_us)
        count = proof_calls(self._data, call_us)
        outs = self._data.new_outputs(count)
        fill_us = self._data.fill_us(outs) / count
        series = TimedSeries(self._data, "proof", count, outs)
        _require_own_outputs(self.name, series)
        if missing := self._known_series.captured.launches_missing or series.captured.launches_missing:
            raise CannotCapture(f"{self.name}: {missing}")
        if difference := series.difference(self._known_series.nodes, f"in that of {self._calls} calls"):
            raise WrongResult("proof sample", f"{self.name}: {difference}")
        allowed_us = proof_limit_us(call_us, fill_us, count, run_us, self._message_us)
        whole_us, heads = series.proof(count * allowed_us)
        proof_us = whole_us / count
        self.written += heads
        if proof_us > allowed_us:
            raise WrongResult(
                "proof sample",
                f"{self.name}: a call takes {call_us:.2f} us, and {proof_us:.2f} us where "
                f"each of {count} calls writes an output of its own; at most {allowed_us:.2f} us are allowed",
            )

    @property
    def nodes(self) -> CallNodes | None:
        """The nodes of one call of the timed graph; None without a graph."""
        return self._known_series.nodes if self._graph else None

    @property
    def _known_series(self) -> TimedSeries:
        assert self._series is not None  # noqa: S101  # samples are taken after they are planned
        return self._series

    @property
    def _intended_us(self) -> float:
        return CPU_SAMPLE_US if self.is_cpu else SAMPLE_US

    def _calls_of_sample(self, call_us: float) -> int:
        """How many calls a sample of the intended length has."""
        most = MAX_CPU_CALLS if self.is_cpu else MAX_CALLS
        return max(1, min(most, math.ceil(self._intended_us / max(0.1, call_us))))

    def _prepare(self, calls: int, *, graph: bool) -> None:
        self._graph = graph
        outs = None if graph else self._data.own_outputs(calls)
        self._calls = calls if outs is None else len(outs)
        self._series = TimedSeries(self._data, "arm", self._calls, outs, graph=graph)

    def _time(self, calls: int, *, keep: bool = False) -> float:
        timed = self._known_series.time(calls)
        if keep:
            self.outside_us.append(timed.outside_us / calls)
        on_cpu_us = timed.outside_us - self._data.publish_us
        return (on_cpu_us if self.is_cpu else timed.inside_us[0] if keep else shorter_us(timed)) / calls


def _require_own_outputs(name: str, series: TimedSeries) -> None:
    """Raise `CannotCapture` if all calls write one buffer: it cannot be seen then that each of them computes."""
    if series.shares_outputs:
        raise CannotCapture(f"{name}: {SHARED_OUTPUT}")
