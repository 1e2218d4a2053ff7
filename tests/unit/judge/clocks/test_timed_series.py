"""Timed series: the judge's clock stops when its copies are complete, and only these copies are judged."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Output, is_poison, make_inputs
from pytest_fa.judge import candidate as candidate_module
from pytest_fa.judge.candidate import Candidate, CommandTimes
from pytest_fa.judge.clocks import timed_series
from pytest_fa.judge.clocks.fresh_data import FreshData, Heads, Place
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.records.timing import CallNodes, LaunchedKernel
from pytest_fa.wire.commands import Allocated, Done, Run
from tests.unit.judge.clocks.test_fresh_data import CASE, CPU, Function, copies_q

L2_BYTES = 50 * 2**20


def fresh_data(forward: Function = copies_q, case_id: str = CASE) -> FreshData:
    """Fresh data with eight outputs for a function of this process."""
    case = parse_case(case_id)
    return FreshData(Candidate.of_function(forward, "cpu"), case, make_inputs(case, CPU), L2_BYTES)


def test_the_clock_stops_after_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time includes the copies that are made after the answer: work that is finished only then is not free."""
    data = fresh_data()
    series = TimedSeries(data, "calls", 3, graph=False)
    clock_ns = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(candidate_module, "time", type("Clock", (), {"perf_counter_ns": lambda: next(clock_ns)}))
    readings: list[int] = []

    def copy_outputs(_: tuple[Allocated | None, ...]) -> None:
        readings.append(next(clock_ns))

    timed = data.candidate.timed(Run(series.name, 3), copy_outputs=copy_outputs)
    assert (readings, timed.outside_us) == ([1000], 2.0)


def test_the_clock_starts_before_the_data_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens while the data arrive is inside the time: a candidate that stops the judge then gains nothing."""
    data = fresh_data()
    series = TimedSeries(data, "calls", 3, graph=False)
    publish = data.publish

    def publish_slowly() -> None:
        publish()
        time.sleep(0.05)

    monkeypatch.setattr(data, "publish", publish_slowly)
    assert series.time().outside_us >= 50_000


def test_nothing_is_visible_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the judge reads its clock for the start, the shared buffers still have the data of the run before."""
    data = fresh_data()
    series = TimedSeries(data, "calls", 3, graph=False)
    series.time()
    before = [shared.clone() for shared in data._shared]
    seen: list[bool] = []

    def read_clock() -> int:
        seen.append(all(torch.equal(old, shared) for old, shared in zip(before, data._shared, strict=True)))
        return time.monotonic_ns()

    monkeypatch.setattr(candidate_module, "time", type("Clock", (), {"perf_counter_ns": read_clock}))
    series.time()
    assert seen == [True, False]


def test_what_is_written_after_the_copies_does_not_count() -> None:
    """A function that returns before its output is there is judged by what was there when the clock stopped."""
    threads: list[threading.Thread] = []
    has_stopped = threading.Event()  # the clock

    def late(q: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        def work() -> None:
            has_stopped.wait()
            out.copy_(q)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return out

    series = TimedSeries(fresh_data(late), "calls", 1, graph=False)
    try:
        series.time()
    finally:
        has_stopped.set()
    for thread in threads:
        thread.join()
    head = series.written_head()
    assert bool(is_poison(head.output.out).all())
    assert bool(is_poison(series.written_heads()[0].output.out).all())


def test_the_last_output_and_chosen_heads_are_copied() -> None:
    """Of all samples, about half of the heads are from the last call's output, and the others from any output."""
    series = TimedSeries(fresh_data(), "calls", 40, graph=False)
    slots = []
    for _ in range(60):
        series.time()
        head = series.written_head()
        assert torch.equal(head.output.out, head.inputs.q)
        (place, _), *others = series._known_copies.heads
        slots.append(place.slot)
        assert others == []
        assert torch.equal(series._known_copies.last.out, series.outs[series.series.out_of[-1]].out)
    assert len(set(slots)) > 5


def test_a_hole_in_the_last_output_is_chosen() -> None:
    """If one element of the last output was not written, its head is the one that is judged."""

    def leaves_a_hole(q: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        kept = out[0, 1, 7, 3].clone()
        out.copy_(q)
        out[0, 1, 7, 3] = kept
        return out

    series = TimedSeries(fresh_data(leaves_a_hole), "calls", 5, graph=False)
    for _ in range(5):
        series.time()
        assert int(is_poison(series.written_head().output.out).sum()) == 1


def test_one_buffer_for_all_calls_is_noticed_and_not_wrong() -> None:
    """If all outputs are one buffer, only the last call's result can be there, and it is compared with its inputs."""
    data = fresh_data()
    series = TimedSeries(data, "calls", 30, [data.outs[0]] * 8, graph=False)
    assert (series.shares_outputs, TimedSeries(data, "own", 30, graph=False).shares_outputs) == (True, False)
    for _ in range(10):
        series.time(heads=5)
        for head in (series.written_head(), *series.written_heads()):
            assert torch.equal(head.output.out, head.inputs.q)


def test_outputs_are_filled_in_one_piece() -> None:
    """Outputs that follow one another are filled at once; others one by one; nothing beside them is changed."""
    data = fresh_data()
    for outs in (data.outs, data.outs[::2], [data.outs[3]]):
        for out in data.outs:
            out.out.zero_()
        data.redraw(outs)
        for out in data.outs:
            assert bool(is_poison(out.out).all()) == any(out is each for each in outs)
    assert data.fill_us(data.outs) > 0


def test_a_place_is_a_view() -> None:
    """A head of an output has four dimensions and shares its memory."""
    out = torch.zeros(2, 3, 4, 5)
    Place(1, 1, Heads(slice(2, 3), slice(0, 1))).part_of(Output(out)).out.fill_(1)
    assert (int(out.sum()), int(out[1, 2].sum())) == (20, 20)


@pytest.mark.parametrize(
    ("times_us", "shortest_us", "runs"),
    [([90.0, 95.0, 99.0], 90.0, 3), ([150.0] * 6 + [99.0], 99.0, 7), ([150.0] * 12, 150.0, 12)],
    ids=["quiet", "busy for a while", "work is skipped"],
)
def test_a_proof_is_repeated_while_all_runs_are_too_long(
    times_us: list[float], shortest_us: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disturbance delays some runs, so that more runs follow; work that is skipped delays all twelve."""
    monkeypatch.setattr(timed_series, "PROOF_PAUSE_SECONDS", 0.0)
    series = TimedSeries(fresh_data(), "proof", 8, graph=False)
    measured, left = series.time, iter(times_us)

    def time_of_list(heads: int) -> CommandTimes:
        return measured(heads=heads)._replace(outside_us=next(left))

    monkeypatch.setattr(series, "time", time_of_list)
    proof_us, written = series.proof(100.0)
    assert (proof_us, len(list(left))) == (shortest_us, 0)
    assert len(written) == runs * (1 + timed_series.PROOF_HEADS)


def test_other_nodes_in_a_timed_graph_are_named() -> None:
    """The kernels of a graph are compared with those of the call that the record names, in whatever order."""
    series = TimedSeries(fresh_data(), "long", 3, graph=False)
    attend, merge = (LaunchedKernel(name, (8, 1, 1), (128, 1, 1), 0) for name in ("attend", "merge"))
    series.captured = Done(launches=(attend, merge), other_nodes={"memset": 1})
    assert series.difference(CallNodes((merge, attend), {"memset": 1}), "alone") == ""
    assert series.difference(CallNodes((attend,), {}), "alone") == (
        "in the timed graph of 3 calls, a call is 1 x attend on 8 x 1 x 1 blocks, 1 x merge on 8 x 1 x 1 blocks, "
        "1 x memset; alone it is 1 x attend on 8 x 1 x 1 blocks"
    )
    assert series.difference(CallNodes((merge, attend, attend), {"memset": 1}), "alone") != ""
    assert "alone it is 1 x merge on 8 x 1 x 1 blocks, 1 x attend on 8 x 1 x 1 blocks, 1 x memset, with branches" in (
        series.difference(CallNodes((merge, attend), {"memset": 1}, "branches"), "alone")
    )
    series.captured = Done(launches_missing="3 calls in a row do not launch the same kernels")
    assert series.difference(CallNodes((attend,), {}), "alone") == "3 calls in a row do not launch the same kernels"


@pytest.mark.parametrize(
    ("case", "heads"),
    [("b1h2s64d64-fp16-seed0", 24), ("b1h2s64d64-fp16-sk0-seed0", 24), ("b1h1s4096d64-fp16-sk65536-seed0", 8)],
)
def test_the_heads_of_a_proof_are_as_many_as_truth_has_time_for(
    monkeypatch: pytest.MonkeyPatch, case: str, heads: int
) -> None:
    """Fewer for long sequences; a case without keys has as many as a short one."""
    series = TimedSeries(fresh_data(case_id=case), "proof", 3, graph=False)
    asked: list[int] = []

    def time_with(heads: int) -> CommandTimes:
        asked.append(heads)
        return CommandTimes(1.0, (1.0,), ())

    monkeypatch.setattr(series, "time", time_with)
    monkeypatch.setattr(series, "written_head", lambda: None)
    monkeypatch.setattr(series, "written_heads", list)
    series.proof(10.0)
    assert asked == [heads] * 3
