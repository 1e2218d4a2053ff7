"""Buffers that take turns: how many, what is in them, whose turn it is, what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import WrongResult
from pytest_fa.measure.rotation import Rotation
from pytest_fa.run.inputs import make_inputs

CASE = parse_case("b1h2s32d64-fp16-seed0")
BYTES = 4 * 2 * 32 * 64 * 2  # q, k, v and out


def rotation(sets: int = 3, case: str = "b1h2s32d64-fp16-seed0") -> Rotation:
    """So many sets of a case's data."""
    parsed = parse_case(case)
    return Rotation(parsed, make_inputs(parsed, torch.device("cpu")), 4 * parsed.bytes_per_call * sets)


class Recorder:
    """A kernel that writes how often it was called, and remembers with what."""

    def __init__(self, *, allocates: bool = False) -> None:
        self.outs: list[int] = []
        self.queries: list[int] = []
        self._allocates = allocates

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any = None, **_: Any) -> torch.Tensor:
        """One call."""
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
    """As many sets as a quarter of L2 holds, one at least and eight at most; one set that is larger is said to be."""
    made = Rotation(CASE, make_inputs(CASE, torch.device("cpu")), l2_bytes)

    assert CASE.bytes_per_call == BYTES
    assert (len(made), made.exceeds_l2) == (sets, exceeds)


@pytest.mark.parametrize("case", ["b1h2s32d64-fp16-seed0", "b2h4s32d64-bf16-causal-kv2-sk48-bshd-seed1"])
def test_sets_hold_the_same_data_but_for_a_sign(case: str) -> None:
    """Every set has the same q, k, strides, scale and mask at addresses of its own; every second v is negative."""
    sets = rotation(3, case).inputs

    first = sets[0]
    addresses = [tensor.data_ptr() for each in sets for tensor in each[:3]]
    assert len(set(addresses)) == 9
    for other, sign in zip(sets[1:], (-1, 1), strict=True):
        assert [torch.equal(*pair) for pair in zip(first[:2], other[:2], strict=True)] == [True] * 2
        assert torch.equal(first.v * sign, other.v)
        assert [tensor.stride() for tensor in first[:3]] == [tensor.stride() for tensor in other[:3]]
        assert (first.scale, first.causal) == (other.scale, other.causal)


def test_outputs_begin_as_nan_in_the_layout_of_q() -> None:
    """Given outputs are full of NaN, of q's shape and strides, and no two share memory."""
    made = rotation(3, "b2h4s32d64-fp16-bshd-seed0")

    assert [bool(out.isnan().all()) for out in made.given] == [True] * 3
    assert {out.stride() for out in made.given} == {made.inputs[0].q.stride()}
    assert len({out.data_ptr() for out in made.given}) == 3


def test_sets_take_turns() -> None:
    """Calls go through the sets in order, inputs and output together, and start over after the last."""
    made, kernel = rotation(3), Recorder()

    for _ in range(7):
        made.call(kernel)

    order = [0, 1, 2, 0, 1, 2, 0]
    assert kernel.outs == [made.given[turn].data_ptr() for turn in order]
    assert kernel.queries == [made.inputs[turn].q.data_ptr() for turn in order]


@pytest.mark.parametrize("allocates", [False, True])
def test_outputs_are_the_last_of_each_set(allocates: bool) -> None:  # noqa: FBT001  # a parameter
    """Each set keeps the output of its last call, also one that the kernel allocated itself."""
    made, kernel = rotation(3), Recorder(allocates=allocates)

    for _ in range(5):
        made.call(kernel)

    assert [float(out.flatten()[0]) for out in made.outputs] == [4.0, -5.0, 3.0]  # less the sign of the second


def test_flip_turns_every_sign_and_the_case_keeps_its_own() -> None:
    """`flip` negates all v where they lie; the inputs that the sets were made from stay as they were."""
    parsed = parse_case("b1h2s32d64-fp16-seed0")
    given = make_inputs(parsed, torch.device("cpu"))
    plain = given.v.clone()
    made = Rotation(parsed, given, 12 * parsed.bytes_per_call)
    addresses = [each.v.data_ptr() for each in made.inputs]

    made.flip()

    assert [torch.equal(each.v, sign * plain) for each, sign in zip(made.inputs, (-1, 1, -1), strict=True)] == [
        True
    ] * 3
    assert [each.v.data_ptr() for each in made.inputs] == addresses
    assert torch.equal(given.v, plain)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_changed_input_is_found(name: str) -> None:
    """One element of one tensor of one set that is not what it was is wrong, signs apart."""
    made = rotation(3)
    made.flip()
    made.require_untouched()
    getattr(made.inputs[1], name)[0, 1, 5, 2] += 1

    with pytest.raises(WrongResult, match=f"changed its input {name} while it was timed"):
        made.require_untouched()


def test_begin_starts_over() -> None:
    """After `begin` the first set is next, and only sets that are called from then on have outputs."""
    made, kernel = rotation(3), Recorder()
    for _ in range(4):
        made.call(kernel)

    made.begin()
    before = made.outputs
    made.call(kernel)
    made.call(kernel)

    assert before == []
    assert [float(out.flatten()[0]) for out in made.outputs] == [5.0, -6.0]


def test_poison() -> None:
    """After `poison` no given output holds anything but NaN: what a later call does not write shows."""
    made = rotation(2)
    for _ in range(2):
        made.call(Recorder())

    made.poison()

    assert [bool(out.isnan().all()) for out in made.given] == [True, True]


def test_turns_made_before_a_clock_runs() -> None:
    """The arguments of a number of calls, in the sets' order."""
    made = rotation(2)

    turns = made.turns(5)

    order = [0, 1, 0, 1, 0]
    assert [(q.data_ptr(), out.data_ptr()) for q, _, _, _, _, out in turns] == [
        (made.inputs[turn].q.data_ptr(), made.given[turn].data_ptr()) for turn in order
    ]
    assert {(scale, causal) for _, _, _, scale, causal, _ in turns} == {(0.125, "none")}


def test_the_sign_of_scores_is_their_keys() -> None:
    """Scores read no v: there every second set has its k turned, and outputs come back with that sign taken off."""
    made = rotation(2, "b1h2s32d64-fp16-sk48-scores-seed0")
    first, second = made.inputs
    assert torch.equal(first.k, -second.k)
    assert torch.equal(first.v, second.v)

    def scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any = None, **_: Any) -> torch.Tensor:
        assert v.shape == k.shape
        return torch.matmul(q.float(), k.float().transpose(2, 3), out=out.float()).to(out.dtype)

    made.call(scores)
    made.call(scores)
    one, other = made.outputs
    assert one.shape == (1, 2, 32, 48)
    assert torch.equal(one, other)
    made.flip()
    made.require_untouched()
    assert torch.equal(first.k, -made.inputs[1].k)
    first.v.neg_()
    with pytest.raises(WrongResult, match="changed its input v"):
        made.require_untouched()
