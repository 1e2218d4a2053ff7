"""Fresh data: every timed call reads data of its own, at secret places, and what it wrote can be judged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fa.attention.backward import GRADIENTS
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import is_poison, make_inputs
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks import fresh_data as fresh_data_module
from pytest_fa.judge.clocks.fresh_data import (
    MAX_PUBLISH_US,
    MIN_COPY_BYTES_PER_US,
    FreshData,
    stacked,
)
from pytest_fa.judge.clocks.shifts import OFFSET_BYTES, RANGE_BYTES
from pytest_fa.judge.clocks.timed_series import TimedSeries
from pytest_fa.judge.truth import make_truth
from pytest_fa.wire.commands import Run

CPU = torch.device("cpu")
CASE = "b1h2s32d64-fp16-seed0"
OUT_BYTES = 2 * 32 * 64 * 2
Function = Callable[..., torch.Tensor]


def copies_q(q: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    """A kernel whose output is q."""
    return out.copy_(q)


def fresh_data(forward: Function = copies_q, case: str = CASE, l2_bytes: int | None = None) -> FreshData:
    """Fresh data for a function of this process."""
    parsed = parse_case(case)
    candidate = Candidate.of_function(forward, "cpu", parsed.computes)
    return FreshData(candidate, parsed, make_inputs(parsed, CPU), l2_bytes)


def run(data: FreshData, calls: int) -> TimedSeries:
    """Make calls on a new series, and return it."""
    series = TimedSeries(data, "calls", calls, graph=False)
    series.time()
    return series


class Recorder:
    """A kernel that keeps copies of what it reads, and the addresses of its outputs."""

    def __init__(self) -> None:
        self.read: list[tuple[torch.Tensor, ...]] = []
        self.outs: list[int] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any = None, **_: Any) -> torch.Tensor:
        """Keep the inputs and write the number of this call."""
        self.read.append((q.clone(), k.clone(), v.clone()))
        self.outs.append(out.data_ptr())
        target: torch.Tensor = out
        return target.fill_(len(self.read))


# -- what calls read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASE, "b2h4s32d64-bf16-causal-kv2-sk48-bshd-seed1"])
def test_every_call_reads_data_of_its_own(case: str) -> None:
    """200 calls read 200 different sets of q, k and v, in the shapes and strides of the case."""
    kernel = Recorder()
    run(fresh_data(kernel, case), 200)
    like = make_inputs(parse_case(case), CPU)[:3]
    assert len({tuple(tensor.view(torch.int16).sum().item() for tensor in read) for read in kernel.read}) == 200
    assert all([tensor.shape for tensor in read] == [tensor.shape for tensor in like] for read in kernel.read)
    assert all([tensor.stride() for tensor in read] == [tensor.stride() for tensor in like] for read in kernel.read)


@pytest.mark.parametrize("case", [CASE, "b1h2s32d64-fp32-seed0"])
def test_offsets_are_multiples_of_128_bytes(case: str) -> None:
    """Offsets are multiples of 128 bytes, independent for q, k and v, and spread over the whole range."""
    data = fresh_data(case=case)
    element_bytes = make_inputs(parse_case(case), CPU).q.element_size()
    offsets = [[shift * element_bytes for shift in shifts] for shifts in data.series(3000).shifts]
    assert {offset % OFFSET_BYTES for triple in offsets for offset in triple} == {0}
    for of_tensor in zip(*offsets, strict=True):
        assert 0 <= min(of_tensor) < 0.05 * RANGE_BYTES
        assert 0.95 * RANGE_BYTES < max(of_tensor) < RANGE_BYTES
    assert sum(len(set(triple)) < 3 for triple in offsets) < 30


def test_data_and_offsets_are_secret() -> None:
    """Two instances have other data, offsets and order of outputs, even if every public generator has the same seed."""
    instances = []
    for _ in range(2):
        random.seed(0)
        torch.manual_seed(0)
        kernel = Recorder()
        series = run(fresh_data(kernel, l2_bytes=4 * 8 * OUT_BYTES), 100)
        instances.append((series.series.shifts, series.series.out_of, kernel.read[0][0].flatten()[:8].tolist()))
    for first, second in zip(*instances, strict=True):
        assert first != second


def test_a_redraw_changes_everything() -> None:
    """After a redraw, calls at the same places read other data, and outputs are full of NaN again."""
    kernel = Recorder()
    data = fresh_data(kernel)
    run(data, 1)
    for _ in range(30):
        data.redraw()
        assert bool(is_poison(data.outs[0].out).all())
        data.candidate.timed(Run("calls", 1))
    for before, after in zip(kernel.read, kernel.read[1:], strict=False):
        for old, new in zip(before, after, strict=True):
            assert float((old == new).float().mean()) < 0.05


# -- what calls write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("l2_bytes", "count", "exceeds"),
    [
        (None, 1, False),
        (4 * 4 * OUT_BYTES - 1, 3, True),
        (4 * 4 * OUT_BYTES, 4, False),
        (4 * 7 * OUT_BYTES + 3, 7, False),
        (50 * 2**20, 8, False),
        (4 * OUT_BYTES - 1, 1, True),
    ],
)
def test_number_of_outputs(l2_bytes: int | None, count: int, *, exceeds: bool) -> None:
    """Outputs fill at most a quarter of L2, and are 1 to 8; `exceeds_l2` is True if one call is larger than that."""
    data = fresh_data(l2_bytes=l2_bytes)
    assert parse_case(CASE).bytes_per_call == 4 * OUT_BYTES
    assert (len(data.outs), data.exceeds_l2) == (count, exceeds)


def test_outputs_begin_as_nan_in_the_layout_of_q() -> None:
    """Outputs are filled with NaN, have q's shape and strides, and do not share memory."""
    case = "b2h4s32d64-fp16-bshd-seed0"
    data = fresh_data(case=case, l2_bytes=50 * 2**20)
    assert [bool(each.out.isnan().all()) for each in data.outs] == [True] * 8
    assert {each.out.stride() for each in data.outs} == {make_inputs(parse_case(case), CPU).q.stride()}
    for index, out in enumerate(data.outs):
        out.out.fill_(index)
    assert [float(each.out.float().mean()) for each in data.outs] == list(range(8))


def test_outputs_are_written_in_a_secret_order() -> None:
    """Of eight calls in a row, each writes another output, in an order that changes."""
    data, kernel = fresh_data(l2_bytes=50 * 2**20), Recorder()
    out_of = data.series(80).out_of
    rounds = [out_of[start : start + 8] for start in range(0, 80, 8)]
    assert [sorted(each) for each in rounds] == [list(range(8))] * 10
    assert len(set(rounds)) > 5
    other = fresh_data(kernel, l2_bytes=50 * 2**20)
    series = run(other, 20)
    assert kernel.outs == [other.outs[slot].out.data_ptr() for slot in series.series.out_of]


def adds_k(q: torch.Tensor, k: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    """A kernel whose output is q plus the k of its group of heads."""
    return torch.add(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), out=out)


@pytest.mark.parametrize("case", [CASE, "b2h6s32d64-fp16-kv2-seed0", "b2h4s32d64-bf16-kv1-bshd-seed0"])
def test_a_written_head_comes_with_what_its_call_read(case: str) -> None:
    """A head of a timed output comes with the q of this head, and the k and v of its group, that the last call read."""
    data = fresh_data(adds_k, case, l2_bytes=50 * 2**20)
    series = run(data, 50)
    series.time(heads=39)
    heads = [*series.written_heads(), series.written_head()]
    for head in heads:
        assert [tuple(tensor.shape) for tensor in head.inputs[:3]] == [(1, 1, 32, 64)] * 3
        assert torch.equal(head.output.out, head.inputs.q + head.inputs.k)
    assert len({float(head.output.out.float().sum()) for head in heads}) > 8
    inputs, output = stacked(heads)
    assert output.out.shape == inputs.q.shape == inputs.v.shape == (40, 1, 32, 64)
    assert torch.equal(output.out, inputs.q + inputs.k)


def test_heads_of_sequences_behind_one_another_have_their_own_sinks() -> None:
    """A head has all sequences of its call, each of which gets the sink and the slope of this head."""
    case = "b4h4s32d64-fp16-var2-alibi-sink-thd-seed0"
    data = fresh_data(case=case)
    series = run(data, 3)
    heads = [series.written_head() for _ in range(8)]
    inputs, output = stacked(heads)
    assert make_truth(inputs).out.shape == output.out.shape == (8 * 4, 1, 32, 64)
    for word in ("sink", "alibi_slopes"):
        own = torch.cat([head.inputs.extra[word].flatten() for head in heads])
        assert torch.equal(inputs.extra[word].flatten(), own.repeat_interleave(4))


def test_a_written_head_is_a_private_copy() -> None:
    """What calls write later does not change a head that was taken before."""
    data = fresh_data()
    series = run(data, 3)
    head = series.written_head()
    before = head.output.out.clone()
    data.redraw()
    assert torch.equal(head.output.out, before)
    assert torch.equal(head.output.out, head.inputs.q)


def test_a_result_of_an_earlier_call_is_wrong() -> None:
    """A kernel that keeps its first result and returns it later has an output that does not belong to its inputs."""
    kept: list[torch.Tensor] = []

    def keeps(q: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        kept.append(q.clone())
        return out.copy_(kept[0])

    data = fresh_data(keeps)
    head = run(data, 20).written_head()
    assert float((head.output.out == head.inputs.q).float().mean()) < 0.05


def test_an_output_that_was_never_written_keeps_the_poison() -> None:
    """An element that no timed call wrote still has the bits of the poison."""

    def writes_half(q: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        out[..., 1:] = q[..., 1:]
        return out

    data = fresh_data(writes_half)
    head = run(data, 4).written_head()
    assert bool(is_poison(head.output.out[..., 0]).all())
    assert bool(head.output.out[..., 1:].isfinite().all())


def test_scores_have_an_output_of_their_own_shape() -> None:
    """The output of a case with scores has a column for each key."""

    def scores(q: torch.Tensor, k: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        return out.copy_(q.float() @ k.float().transpose(2, 3))

    data = fresh_data(scores, "b1h2s32d64-fp16-sk48-scores-seed0")
    head = run(data, 3).written_head()
    expected = (head.inputs.q.float() @ head.inputs.k.float().transpose(2, 3)).half()
    assert head.output.out.shape == (1, 1, 32, 48)
    torch.testing.assert_close(head.output.out, expected)


# -- inputs stay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "name"), [(0, "q"), (1, "k"), (2, "v")])
def test_a_changed_input_is_noticed(place: int, name: str) -> None:
    """If a timed call changes one element of an input, the error names the input."""
    changes = False

    def changes_input(*tensors: torch.Tensor, out: torch.Tensor, **_: Any) -> torch.Tensor:
        if changes:
            tensors[place][0, 1, 5, 2] += 1
        return out.fill_(0)

    data = fresh_data(changes_input)
    run(data, 5)
    data.require_untouched()
    changes = True
    run(data, 1)
    with pytest.raises(WrongResult, match=f"changed its input {name} while it was timed"):
        data.require_untouched()


def test_inputs_are_compared_bit_by_bit() -> None:
    """A change of the lowest bit of one element is noticed."""

    def flips_a_bit(*tensors: torch.Tensor, out: torch.Tensor, **_: Any) -> torch.Tensor:
        tensors[1].view(torch.int16)[0, 0, 0, 0] ^= 1
        return out.fill_(0)

    data = fresh_data(flips_a_bit)
    run(data, 1)
    with pytest.raises(WrongResult, match="changed its input k"):
        data.require_untouched()


# -- the time in which data arrive ------------------------------------------------------------------------------------


def test_data_arrive_when_they_are_published() -> None:
    """`draw` changes nothing that the candidate sees of the inputs; `publish` then does."""
    data = fresh_data()
    before = [shared.clone() for shared in data._shared]
    data.draw()
    assert all(torch.equal(old, shared) for old, shared in zip(before, data._shared, strict=True))
    data.publish()
    assert all(torch.equal(new, shared) for new, shared in zip(data._private, data._shared, strict=True))


def test_outputs_of_a_call_are_counted() -> None:
    """A run may contain more copies if a call has more of them."""
    assert fresh_data().outputs_of_call == 1
    assert fresh_data(case="b1h2s32d64-fp16-bwd-seed0").outputs_of_call == len(GRADIENTS)


def test_the_time_to_publish_is_believed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that slows the judge's copies down while they are measured is not allowed more for it."""
    data = fresh_data()
    clock_ns = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(fresh_data_module, "time", type("Clock", (), {"perf_counter_ns": lambda: next(clock_ns)}))
    size_bytes = sum(private.nbytes for private in data._private)
    assert data.publish_us == MAX_PUBLISH_US + size_bytes / MIN_COPY_BYTES_PER_US["cpu"]
