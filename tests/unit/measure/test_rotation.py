"""The rotation of buffers: number of sets, their content, their order, and the stored outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest_fa.measure.rotation import Rotation

from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import WrongResult
from pytest_fa.run.inputs import is_poison, make_inputs

CASE = parse_case("b1h2s32d64-fp16-seed0")
BYTES = 4 * 2 * 32 * 64 * 2  # q, k, v and out


def rotation(sets: int = 3, case: str = "b1h2s32d64-fp16-seed0") -> Rotation:
    """A rotation with `sets` sets of a case's buffers."""
    parsed = parse_case(case)
    return Rotation(parsed, make_inputs(parsed, torch.device("cpu")), 4 * parsed.bytes_per_call * sets)


class Recorder:
    """A kernel that writes the number of its call and records the addresses of its q and out."""

    def __init__(self, *, allocates: bool = False) -> None:
        self.outs: list[int] = []
        self.queries: list[int] = []
        self._allocates = allocates

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any = None, **_: Any) -> torch.Tensor:
        """Record the addresses and write the number of this call."""
        assert k.shape == v.shape
        self.outs.append(out.data_ptr())
        self.queries.append(q.data_ptr())
        target: torch.Tensor = torch.empty_like(out) if self._allocates else out
        return target.fill_(len(self.outs))


@pytest.mark.parametrize(
    ("l2_bytes", "sets", "exceeds"),
    [
        (None, 1, False),
        (4 * BYTES - 1, 1, True),
        (4 * BYTES, 1, False),
        (8 * BYTES, 2, False),
        (4 * 7 * BYTES + 3, 7, False),
        (50 * 2**20, 8, False),
    ],
)
def test_number_of_sets(l2_bytes: int | None, sets: int, *, exceeds: bool) -> None:
    """The sets fill at most a quarter of the L2, with 1 to 8 sets; `exceeds_l2` is True if a single set is larger."""
    buffers = Rotation(CASE, make_inputs(CASE, torch.device("cpu")), l2_bytes)

    assert CASE.bytes_per_call == BYTES
    assert (len(buffers), buffers.exceeds_l2) == (sets, exceeds)


@pytest.mark.parametrize("case", ["b1h2s32d64-fp16-seed0", "b2h4s32d64-bf16-causal-kv2-sk48-bshd-seed1"])
def test_sets_hold_the_same_data_but_for_a_sign(case: str) -> None:
    """All sets have the same q, k, strides, scale and mask at different addresses; every second v is negated."""
    sets = rotation(3, case).inputs

    first = sets[0]
    addresses = [tensor.data_ptr() for each in sets for tensor in each[:3]]
    assert len(set(addresses)) == 9
    for later, sign in zip(sets[1:], (-1, 1), strict=True):
        assert [torch.equal(*pair) for pair in zip(first[:2], later[:2], strict=True)] == [True] * 2
        assert torch.equal(first.v * sign, later.v)
        assert [tensor.stride() for tensor in first[:3]] == [tensor.stride() for tensor in later[:3]]
        assert (first.scale, first.causal) == (later.scale, later.causal)


def test_outputs_begin_as_nan_in_the_layout_of_q() -> None:
    """Output buffers are filled with NaN, have q's shape and strides, and do not share memory."""
    buffers = rotation(3, "b2h4s32d64-fp16-bshd-seed0")

    assert [bool(out.isnan().all()) for out in buffers.out_buffers] == [True] * 3
    assert {out.stride() for out in buffers.out_buffers} == {buffers.inputs[0].q.stride()}
    assert len({out.data_ptr() for out in buffers.out_buffers}) == 3


def test_sets_take_turns() -> None:
    """Calls use the sets in order, inputs and output of the same set together, and start over after the last."""
    buffers, kernel = rotation(3), Recorder()

    for _ in range(7):
        buffers.call(kernel)

    order = [0, 1, 2, 0, 1, 2, 0]
    assert kernel.outs == [buffers.out_buffers[turn].data_ptr() for turn in order]
    assert kernel.queries == [buffers.inputs[turn].q.data_ptr() for turn in order]


@pytest.mark.parametrize("allocates", [False, True])
def test_outputs_are_the_last_of_each_set(allocates: bool) -> None:  # noqa: FBT001  # a parameter
    """`outputs` has the output of the last call on each set, also if the kernel allocated it."""
    buffers, kernel = rotation(3), Recorder(allocates=allocates)

    for _ in range(5):
        buffers.call(kernel)

    assert [float(out.flatten()[0]) for out in buffers.outputs] == [4.0, -5.0, 3.0]  # the second set is negated


def test_flip_negates_every_v_and_not_the_original() -> None:
    """`flip` negates the v of every set in place and does not change the inputs that the sets were copied from."""
    parsed = parse_case("b1h2s32d64-fp16-seed0")
    original = make_inputs(parsed, torch.device("cpu"))
    plain_v = original.v.clone()
    buffers = Rotation(parsed, original, 12 * parsed.bytes_per_call)
    addresses = [inputs.v.data_ptr() for inputs in buffers.inputs]

    buffers.flip()

    signs = zip(buffers.inputs, (-1, 1, -1), strict=True)
    assert [torch.equal(inputs.v, sign * plain_v) for inputs, sign in signs] == [True] * 3
    assert [inputs.v.data_ptr() for inputs in buffers.inputs] == addresses
    assert torch.equal(original.v, plain_v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_changed_input_is_found(name: str) -> None:
    """If one element of an input in one set has changed, other than by `flip`, the error names the input."""
    buffers = rotation(3)
    buffers.flip()
    buffers.require_untouched()
    getattr(buffers.inputs[1], name)[0, 1, 5, 2] += 1

    with pytest.raises(WrongResult, match=f"changed its input {name} while it was timed"):
        buffers.require_untouched()


def test_begin_starts_over() -> None:
    """After `begin`, the first set is next, and `outputs` has only sets that are used from then on."""
    buffers, kernel = rotation(3), Recorder()
    for _ in range(4):
        buffers.call(kernel)

    buffers.begin()
    before = buffers.outputs
    buffers.call(kernel)
    buffers.call(kernel)

    assert before == []
    assert [float(out.flatten()[0]) for out in buffers.outputs] == [5.0, -6.0]


def test_poison() -> None:
    """After `poison`, every output buffer is filled with NaN."""
    buffers = rotation(2)
    for _ in range(2):
        buffers.call(Recorder())

    buffers.poison()

    assert [bool(out.isnan().all()) for out in buffers.out_buffers] == [True, True]


def test_turns_are_the_arguments_of_calls() -> None:
    """`turns` returns the arguments of a number of calls, in the order of the sets."""
    buffers = rotation(2)

    turns = buffers.turns(5)

    order = [0, 1, 0, 1, 0]
    assert [(q.data_ptr(), out.data_ptr()) for q, _, _, _, _, out in turns] == [
        (buffers.inputs[turn].q.data_ptr(), buffers.out_buffers[turn].data_ptr()) for turn in order
    ]
    assert {(scale, causal) for _, _, _, scale, causal, _ in turns} == {(0.125, "none")}


def test_k_is_negated_for_scores() -> None:
    """Scores do not read v: every second set has k negated, and `outputs` negates its scores back."""
    buffers = rotation(2, "b1h2s32d64-fp16-sk48-scores-seed0")
    first, second = buffers.inputs
    assert torch.equal(first.k, -second.k)
    assert torch.equal(first.v, second.v)

    def scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any = None, **_: Any) -> torch.Tensor:
        assert v.shape == k.shape
        return torch.matmul(q.float(), k.float().transpose(2, 3), out=out.float()).to(out.dtype)

    buffers.call(scores)
    buffers.call(scores)
    scores_of_first, scores_of_second = buffers.outputs
    assert scores_of_first.shape == (1, 2, 32, 48)
    assert torch.equal(scores_of_first, scores_of_second)
    buffers.flip()
    buffers.require_untouched()
    assert torch.equal(first.k, -buffers.inputs[1].k)
    first.v.neg_()
    with pytest.raises(WrongResult, match="changed its input v"):
        buffers.require_untouched()


def test_an_output_that_was_never_written_keeps_the_poison() -> None:
    """An element that a timed call never wrote still has the bits of the poison, also in a set whose V is negated."""
    buffers = rotation(2)
    buffers.poison()
    for out in buffers.out_buffers:
        out[..., 1:] = 1.0
    assert [bool(is_poison(out[..., 0]).all()) for out in buffers.written(2)] == [True, True]
    assert [float(out[..., 1:].mean()) for out in buffers.written(2)] == [1.0, -1.0]
