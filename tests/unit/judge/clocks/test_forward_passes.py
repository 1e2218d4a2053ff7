"""Timed backward calls: each gets the results of the forward pass of its own q, k and v, and a dO of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fa.attention.backward import DOUT, LSE, OUT
from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks import forward_passes
from pytest_fa.judge.clocks.forward_passes import FEWEST_PLACES as PLACES
from pytest_fa.judge.clocks.fresh_data import FreshData, Written, stacked
from pytest_fa.judge.clocks.shifts import STEPS
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.judge.forward_results import computed_results
from pytest_fa.judge.gradients import truth_of_gradients
from pytest_fa.judge.output_check import check_output

CPU = torch.device("cpu")
CASE = "b1h2s32d64-fp16-bwd-seed0"
CASES = (CASE, "b2h4s33d64-bf16-causal-kv2-sk48-bshd-bwd-dlse-seed1", "b4h2s20d64-fp16-var3-bwd-seed0")
Function = Callable[..., Any]
Call = dict[str, torch.Tensor]


class Recorder:
    """A kernel that keeps what it reads, and writes it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> torch.Tensor:
        """Keep the inputs and fill the gradients with the number of this call."""
        tensors = {"q": q, "k": k, "v": v, **{name: words[name] for name in (DOUT, OUT, LSE)}}
        self.calls.append({name: tensor.clone() for name, tensor in tensors.items()})
        for name in ("out", "dk", "dv"):
            words[name].fill_(len(self.calls))
        out: torch.Tensor = words["out"]
        return out


def differentiate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> torch.Tensor:
    """A right kernel without a mask."""
    inputs = (tensor.float() for tensor in (q, k, v, words[DOUT], words[OUT]))
    q, k, v, dout, out = inputs
    p = torch.exp(q @ k.mT * words["scale"] - words[LSE][..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * words["scale"]
    for name, gradient in (("out", ds @ k), ("dk", ds.mT @ q), ("dv", p.mT @ dout)):
        words[name].copy_(gradient)
    result: torch.Tensor = words["out"]
    return result


def fresh_data(forward: Function, case: str = CASE, l2_bytes: int | None = None) -> FreshData:
    """Fresh data for a function of this process."""
    parsed = parse_case(case)
    candidate = Candidate.of_function(forward, "cpu", parsed.computes)
    return FreshData(candidate, parsed, make_inputs(parsed, CPU), l2_bytes)


def run(data: FreshData, calls: int) -> TimedSeries:
    """Make calls on a new series, and return it."""
    series = TimedSeries(data, "calls", calls, graph=False)
    series.time()
    return series


def are_right(heads: list[Written]) -> bool:
    """Whether gradients that timed calls wrote are within their bounds."""
    inputs, output = stacked(heads)
    tensors = {"dq": output.out, **output.more}
    truths = truth_of_gradients(inputs)
    return all(check_output(tensors[name], truth, "same_precision").passed for name, truth in truths.items())


def lse_of(call: Call) -> torch.Tensor:
    """The log-sum-exp of what a call without a mask read, [batch, heads, seq_q]."""
    scores: torch.Tensor = call["q"].double() @ call["k"].double().mT / call["q"].shape[-1] ** 0.5
    return scores.logsumexp(-1)


def test_each_call_gets_the_results_of_its_own_tensors() -> None:
    """The output and the log-sum-exp of all calls, also after new data, are those of their q, k and v."""
    kernel = Recorder()
    data = fresh_data(kernel)
    for _ in range(3):
        run(data, 20)
    assert len(kernel.calls) == 60
    for call in kernel.calls:
        lse = lse_of(call)
        torch.testing.assert_close(call[LSE].double(), lse, rtol=1e-5, atol=1e-5)
        p = (call["q"].double() @ call["k"].double().mT / 8 - lse[..., None]).exp()
        torch.testing.assert_close(call[OUT].double(), p @ call["v"].double(), rtol=2**-10, atol=1e-4)


def test_no_two_calls_have_the_same_gradients() -> None:
    """q, k and v lie at few places; at each of them, dO is elsewhere in each call, up to 2048."""
    data = fresh_data(Recorder())
    calls = data.series(PLACES * STEPS).shifts
    moved = ("q", "k", "v", *data._moved_extra)
    names = ("q", "k", "v", OUT, LSE, DOUT)
    places = [tuple(shifts[moved.index(name)] for name in names) for shifts in calls]
    # In one of 70 runs, two places of q are equal; those of q, k and v together are in one of 10^8.
    assert len({place[:-1] for place in places}) == len({place[:3] for place in places}) == PLACES
    assert len(set(places)) == len(places) == PLACES * STEPS
    assert len({place[-1] for place in places[:100]}) > 80


def test_calls_read_what_lies_at_their_places() -> None:
    """Few q and v are read in many calls, nearly each with another dO: all are at random places, which may be equal."""
    kernel = Recorder()
    run(fresh_data(kernel), 200)  # a place is left out once in 10^11 runs
    read = [[call[name].view(torch.int16).sum().item() for name in ("q", "v", DOUT)] for call in kernel.calls]
    assert len({(q, v) for q, v, _ in read}) == PLACES
    assert len({(q, v, dout) for q, v, dout in read}) > 190


def test_places_are_secret() -> None:
    """Two instances have other places, even if every public generator has the same seed."""
    chosen = []
    for _ in range(2):
        random.seed(0)
        torch.manual_seed(0)
        data = fresh_data(Recorder())
        assert data._forward_passes
        chosen.append([{name: each[name] for name in "qkv"} for each in data._forward_passes.shifts])
    assert len(chosen[0]) == len(chosen[1]) == PLACES
    assert not [place for place in chosen[0] if place in chosen[1]]


@pytest.mark.parametrize(("scores", "places"), [(4, 4), (3, 3), (1, 1), (0.5, 1)])
def test_fewer_places_have_room_if_there_are_many_scores(
    monkeypatch: pytest.MonkeyPatch, scores: float, places: int
) -> None:
    """The judge computes no more scores than it has time for, and those of one place at least."""
    monkeypatch.setattr(forward_passes, "MAX_SCORES", int(scores * 2 * 32 * 32))
    data = fresh_data(differentiate)
    assert data._forward_passes
    assert len(data._forward_passes.shifts) == places
    assert are_right(run(data, 10).written_heads())


@pytest.mark.parametrize("case", CASES)
def test_judged_heads_have_the_results_of_their_call(case: str) -> None:
    """Heads come with the output and the log-sum-exp of their own tensors, by which their truth is computed."""
    data = fresh_data(Recorder(), case, l2_bytes=50 * 2**20)
    series = run(data, 30)
    series.time(heads=9)
    for head in series.written_heads():
        own = {name: head.inputs.extra[name] for name in (OUT, LSE)}
        without = head.inputs._replace(
            extra={name: each for name, each in head.inputs.extra.items() if name not in own}
        )
        again = computed_results(without, torch.float64).meant().extra
        meant = head.inputs.meant().extra
        torch.testing.assert_close(meant[LSE], again[LSE], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(meant[OUT], again[OUT], rtol=2**-7, atol=1e-3)


def test_timed_gradients_are_right() -> None:
    """A right kernel passes."""
    data = fresh_data(differentiate)
    series = run(data, 20)
    series.time(heads=9)
    assert are_right(series.written_heads())


@pytest.mark.parametrize("key", ["nothing", "addresses", "q"])
def test_gradients_of_an_earlier_call_are_wrong(key: str) -> None:
    """A kernel that keeps gradients is caught, by whatever it finds them: also by q, k and v, because dO is another."""
    kept: dict[Any, list[torch.Tensor]] = {}
    keys: dict[str, Callable[..., Any]] = {
        "nothing": lambda *_: 0,
        "addresses": lambda *tensors: tuple(tensor.data_ptr() for tensor in tensors),
        "q": lambda q, *_: q.numpy().tobytes(),
    }

    def keeps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> torch.Tensor:
        found = keys[key](q, k, v)
        buffers: list[torch.Tensor] = [words[name] for name in ("out", "dk", "dv")]
        if found not in kept:
            differentiate(q, k, v, **words)
            kept[found] = [buffer.clone() for buffer in buffers]
        for buffer, gradient in zip(buffers, kept[found], strict=True):
            buffer.copy_(gradient)
        return buffers[0]

    data = fresh_data(keeps, l2_bytes=50 * 2**20)
    series = run(data, 40)
    series.time(heads=9)  # on other data at the same places
    assert not are_right(series.written_heads())
