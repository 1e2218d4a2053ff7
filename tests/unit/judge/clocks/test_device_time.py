"""Timing with a clock that the kernel itself advances: number and content of samples, both clocks, timed outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.candidate.agent import Agent
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import is_poison, make_inputs
from pytest_fa.judge import candidate as candidate_module
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks import call_time as call_time_module
from pytest_fa.judge.clocks import device_time as device_time_module
from pytest_fa.judge.clocks import fresh_data as fresh_data_module
from pytest_fa.judge.clocks.call_time import call_time
from pytest_fa.judge.clocks.device_time import NothingLaunched, _event_pairs, _graph_slope, device_time
from pytest_fa.judge.clocks.fresh_data import FreshData
from pytest_fa.judge.clocks.measure import measure
from pytest_fa.wire.commands import Capture, Command, Done, Open, Prepare, ReplaySeries, Run

CPU = torch.device("cpu")
CASE = parse_case("b1h1s16d64-fp16-seed0")


class Kernel:
    """A kernel that copies q and advances a clock by `cost_us`; its first `slow_calls` calls take 1 s each."""

    def __init__(self, cost_us: float, slow_calls: int = 0) -> None:
        self.now_ns = 0
        self.calls = 0
        self._cost_us, self._slow_calls = cost_us, slow_calls

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor | None = None, **_: object
    ) -> torch.Tensor:
        """Advance the clock by the cost of this call and write the output."""
        assert out is not None
        assert k.shape == v.shape
        self.calls += 1
        self.now_ns += round(1000 * (1e6 if self.calls <= self._slow_calls else self._cost_us))
        return out.copy_(q)

    def perf_counter_ns(self) -> int:
        """The judge's clock, which only calls of this kernel advance."""
        return self.now_ns

    def monotonic(self) -> float:
        """The same clock, for limits."""
        return self.now_ns / 1e9


def fresh_data(function: Callable[..., torch.Tensor]) -> FreshData:
    """Fresh data for a function of this process."""
    return FreshData(Candidate.of_function(function, "cpu"), CASE, make_inputs(CASE, CPU), None)


def clocked(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, function: Callable[..., torch.Tensor] | None = None
) -> FreshData:
    """Fresh data for a kernel, or a function that calls it, whose clock replaces the judge's."""
    monkeypatch.setattr(candidate_module, "time", kernel)
    monkeypatch.setattr(device_time_module, "time", kernel)
    monkeypatch.setattr(fresh_data_module, "time", kernel)
    return fresh_data(function or kernel)


# -- the CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_us", "calls", "samples"),
    [
        (10.0, 100, 50),
        (1_000.0, 10, 20),
        (4_000.0, 2, 25),
        (10_000.0, 1, 20),
        (50_000.0, 1, 5),
        (500_000.0, 1, 5),
        (1e6, 1, 3),
        (4e6, 1, 1),
    ],
)
def test_number_of_samples(monkeypatch: pytest.MonkeyPatch, cost_us: float, calls: int, samples: int) -> None:
    """Samples of 10 ms or one call: at least 5 and 0.2 s, at most 50, and none after 3 s; two calls come before."""
    kernel = Kernel(cost_us)

    timing, outside, written, _ = device_time(clocked(monkeypatch, kernel))

    assert timing.samples_us == pytest.approx((cost_us,) * samples)
    assert (timing.calls_per_sample, len(written), outside) == (calls, samples, None)
    assert timing.median_us == pytest.approx(cost_us)
    assert kernel.calls == samples * calls + 2


def test_first_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call, which includes one-time set-up, neither is a sample nor decides how long samples are."""
    timing = device_time(clocked(monkeypatch, Kernel(100.0, slow_calls=1))).timing

    assert (max(timing.samples_us), timing.calls_per_sample) == (100.0, 100)


def test_written_heads_are_those_of_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample gives one head with what its call read."""
    written = device_time(clocked(monkeypatch, Kernel(50_000.0))).written

    assert len(written) == 5
    assert all(torch.equal(head.output.out, head.inputs.q) for head in written)


def test_a_timed_call_that_writes_nothing_is_found() -> None:
    """If a kernel writes only in its first calls, the heads of timed calls still hold the poison."""
    calls = 0

    def writes_twice(q: torch.Tensor, *_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 2:
            time.sleep(0.05)
            return out
        return out.copy_(q)

    data = fresh_data(writes_twice)
    assert all(bool(is_poison(head.output.out).all()) for head in device_time(data).written)


def test_a_kernel_that_changes_its_inputs_while_timed_is_wrong() -> None:
    """A change of an input during a timed call raises, whatever the output is."""

    def changes_v(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **_: object) -> torch.Tensor:
        v.neg_()
        return torch.add(q, k, out=out)

    data = fresh_data(changes_v)
    with pytest.raises(WrongResult, match="changed its input v while it was timed"):
        device_time(data)


@pytest.mark.alone
def test_real_clock() -> None:
    """On the real clock, a kernel that sleeps for 5 ms takes at least 5 ms and less than 15 ms."""

    def sleeps(q: torch.Tensor, *_: torch.Tensor, out: torch.Tensor, **__: object) -> torch.Tensor:
        time.sleep(0.005)
        return out.copy_(q)

    data = fresh_data(sleeps)
    timing = device_time(data).timing

    assert 5_000 <= timing.median_us < 15_000
    assert timing.on_core_us is not None
    assert timing.on_core_us < 5_000


# -- the GPU's ways, with a candidate that only has clocks ------------------------------------------------------------


class Clocked:
    """A connection whose series take `call_us` per call by the judge's clock, and another time by the candidate's.

    Each run has a message of `message_us`.  Calls of series `proof` take `proof_us`.  The first `late_runs` runs of
    series `long` take `late_us` more by the judge's clock.
    """

    def __init__(
        self, call_us: float, inside_us: float, message_us: float = 0.0, proof_us: float | None = None
    ) -> None:
        self.agent, self.now_us = Agent(lambda *_: pytest.fail("nothing is opened")), 0.0
        self._call_us, self._inside_us, self._message_us = call_us, inside_us, message_us
        self._proof_us = call_us if proof_us is None else proof_us
        self._calls: dict[str, int] = {}
        self.late_runs, self.late_us = 0, 0.0
        self.captured: list[str] = []

    def ask(
        self,
        command: Command,
        seconds: float,
        descriptor: int | None = None,
        meanwhile: Callable[[], object] | None = None,
        *,
        awake: bool = False,  # noqa: ARG002  # no time passes
    ) -> Done:
        """Advance the clocks."""
        assert (seconds > 0, descriptor, meanwhile) == (True, None, None)
        match command:
            case Open():
                return Done(why_no_tools="simulated")
            case Prepare():
                self._calls[command.name] = len(command.series.shifts)
            case Capture():
                self.captured.append(command.name)
                return Done(allocated=(None,) * 8)
            case ReplaySeries() | Run():
                count = command.count if isinstance(command, Run) else self._calls[command.name]
                self.now_us += self._message_us + count * (self._proof_us if command.name == "proof" else self._call_us)
                if command.name == "long" and self.late_runs:
                    self.late_runs -= 1
                    self.now_us += self.late_us
                return Done(inside_us=(self._inside_us * count,))
        return Done()

    def perf_counter_ns(self) -> int:
        """The judge's clock."""
        return round(1000 * self.now_us)


def simulated(monkeypatch: pytest.MonkeyPatch, connection: Clocked) -> FreshData:
    """Fresh data for a simulated candidate, whose times are those of the judge's clock.

    That these tests lose their processor on a busy machine repeats no run.
    """
    monkeypatch.setattr("pytest_fa.judge.clocks.gaps.MAX_LOST", 0)
    monkeypatch.setattr(candidate_module, "time", connection)
    monkeypatch.setattr(fresh_data_module, "time", connection)
    monkeypatch.setattr(candidate_module, "LocalConnection", Clocked)  # it lends tensors of this process
    candidate = Candidate(connection, 1)
    candidate.open(None, None, "cpu", "attention")
    return FreshData(candidate, CASE, make_inputs(CASE, CPU), 50 * 2**20)


def test_the_slope_has_both_clocks(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """The period is by the candidate's clock; beside it stand the judge's slope, a whole run and the proof sample."""
    connection = Clocked(call_us=100.0, inside_us=99.0, message_us=500.0, proof_us=103.0)

    timing, outside, written, graphs = _graph_slope(simulated(monkeypatch, connection), 100.0, lambda: False)

    assert timing.median_us == pytest.approx(99.0)
    assert snapshot == timing.method
    assert outside is not None
    assert outside.median_us == pytest.approx(100.0)
    assert outside.whole_us == pytest.approx(100 + 500 / 150)
    assert outside.proof_us == pytest.approx(103 + 500 / 200)
    assert (outside.calls, outside.proof_calls) == (150, 200)
    assert connection.captured == ["short", "long", "proof"]
    assert len(written) == 2 * len(timing.samples_us) + 75  # 25 of each of three runs of the proof sample
    assert [graph.name for graph in graphs] == connection.captured
    assert (outside.shares_outputs, outside.fill_us, outside.outputs) == (False, 0.0, 1)


@pytest.mark.parametrize(
    ("late", "samples", "slope_us"), [(0, 7, 100.0), (10, 15, 100.0), (1000, 40, 110.0)], ids=["never", "first", "all"]
)
def test_more_samples_follow_while_the_clocks_differ(
    monkeypatch: pytest.MonkeyPatch, late: int, samples: int, slope_us: float
) -> None:
    """Samples that a busy machine delays are outnumbered by others.  If all are delayed, the difference stays."""
    connection = Clocked(100.0, inside_us=100.0)
    connection.late_runs, connection.late_us = late, 1_000.0
    monkeypatch.setattr("pytest_fa.records.sampling.MAX_SECONDS", 60.0)  # the clock of a busy machine would end it
    timing, outside, *_ = _graph_slope(simulated(monkeypatch, connection), 100.0, lambda: False)
    assert outside is not None
    assert len(timing.samples_us) == samples
    assert outside.median_us == pytest.approx(slope_us)
    assert timing.median_us == pytest.approx(100.0)


def test_calls_that_take_no_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the longer graph takes no longer, the call launches nothing."""
    with pytest.raises(NothingLaunched, match="the call launches nothing") as caught:
        _graph_slope(simulated(monkeypatch, Clocked(100.0, inside_us=0.0)), 100.0, lambda: False)
    assert len(caught.value.written) >= 14  # a head of each graph and sample


@pytest.mark.parametrize(("estimate_us", "calls"), [(20.0, 1000), (2_000.0, 10), (50_000.0, 1)])
def test_calls_without_a_graph_have_no_slope(monkeypatch: pytest.MonkeyPatch, estimate_us: float, calls: int) -> None:
    """Without a graph, samples last 10 ms, and the judge's figure includes the message; there is no proof sample."""
    connection = Clocked(call_us=estimate_us, inside_us=estimate_us, message_us=100.0)

    timing, outside, *_ = _event_pairs(simulated(monkeypatch, connection), estimate_us, lambda: False, " (it waits)")

    assert timing.median_us == pytest.approx(estimate_us)
    assert (timing.calls_per_sample, timing.method.endswith("each on its own data (it waits)")) == (calls, True)
    assert outside is not None
    assert outside.whole_us == outside.median_us == pytest.approx(estimate_us + 100.0 / calls)
    assert (outside.calls, outside.proof_us, outside.proof_calls) == (calls, None, None)


# -- call time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_us", "calls", "samples"),
    [(10.0, 200, 7), (100.0, 100, 7), (2_000.0, 5, 7), (10_000.0, 1, 7), (100_000.0, 1, 3), (1e6, 1, 3)],
)
def test_batches(monkeypatch: pytest.MonkeyPatch, cost_us: float, calls: int, samples: int) -> None:
    """Batches of 10 ms and at most 200 calls; 9 batches, or 3 to 9 that fit in 1 s; samples are per call."""
    timing, written = call_time(clocked(monkeypatch, Kernel(cost_us)))

    assert timing.samples_us == pytest.approx((cost_us,) * samples)
    assert (timing.calls_per_sample, timing.method) == (calls, f"wall clock of batches of {calls} calls")
    assert all(torch.equal(head.output.out, head.inputs.q) for head in written)


def test_every_batch_reads_new_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that keeps results from one batch to the next never sees the same data again."""
    sums: list[tuple[int, ...]] = []
    kernel = Kernel(10.0)

    def notes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **_: object) -> torch.Tensor:
        sums.append(tuple(int(tensor.view(torch.int16).sum()) for tensor in (q, k, v)))
        return kernel(q, k, v, out=out)

    call_time(clocked(monkeypatch, kernel, notes))
    assert len(set(sums)) > 0.95 * len(sums) > 1000


def test_the_first_call_is_not_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow first call neither is a sample nor makes batches shorter."""
    timing, _ = call_time(clocked(monkeypatch, Kernel(10.0, slow_calls=1)))

    assert max(timing.samples_us) == pytest.approx(10.0)
    assert timing.calls_per_sample == 200


def test_a_delayed_estimate_does_not_make_batches_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may delay the batch of one call by which the others are planned; then it runs again."""
    kernel = Kernel(100.0)
    data = clocked(monkeypatch, kernel)
    run_us, runs = call_time_module._Batches.run_us, iter((0.0, 20_000.0))
    monkeypatch.setattr(call_time_module._Batches, "run_us", lambda self, calls: run_us(self, calls) + next(runs, 0.0))
    timing, _ = call_time(data)
    assert timing.calls_per_sample == 100


# -- both -------------------------------------------------------------------------------------------------------------


def test_measure_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there are one output, no launches and no second clock; timed heads are there to be judged."""
    kernel = Kernel(50_000.0)
    monkeypatch.setattr(candidate_module, "time", kernel)
    monkeypatch.setattr(device_time_module, "time", kernel)
    monkeypatch.setattr(fresh_data_module, "time", kernel)

    speed, written = measure(Candidate.of_function(kernel, "cpu"), CASE, make_inputs(CASE, CPU))

    assert (speed.device.median_us, speed.call.median_us) == (50_000.0, 50_000.0)
    assert (speed.buffers, speed.exceeds_l2, speed.l2_bytes) == (1, False, None)
    assert (speed.launches, speed.launches_missing) == ((), "runs on the CPU")
    assert (speed.clocks_before, speed.clocks_after, speed.outside) == (None, None, None)
    assert len(written) > len(speed.device.samples_us)
    assert not any(math.isnan(float(head.output.out.float().sum())) for head in written)
