"""The kernels in e4m3 on Hopper's tensor cores, emulated on the CPU.

They are right in any order of copies and threads, and need each of their barriers.  The emulated tensor cores add in 13
bits, so that a kernel with one accumulator for all keys is right and wrong where it is on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.gpu.quantised import E4M3_MAX
from tests.emulator.conftest import ORDERS, Build, bits_of, broken_bounds, complaints, is_found, marks_left
from tests.emulator.emulated import Schedule

pytestmark = [pytest.mark.needs_nvcc, pytest.mark.nightly]  # it needs the headers of CUDA

RUNGS = (
    "fp8_wgmma",
    "fp8_overlap",
    "fp8_sum",
    "fp8_tiles",
    "fp8_max",
    "fp8_transpose",
    "fp8_keys",
    "fp8_shapes",
    "fp8_causal",
    "fp8_split",
    "fp8_four",
    "fp8_stages",
)
# Shapes, and the number of SMs.
SHAPES = (
    ("b1h2s1d64-e4m3-sk127", 2),  # one query, one key tile
    ("b1h2s130d64-e4m3-sk0", 2),  # no key
    ("b1h2s200d64-e4m3-causal-sk600-out_bf16", 2),
    ("b1h2s400d64-e4m3-causal_br-sk200", 2),  # the first queries see no key
    ("b1h4s150d64-e4m3-kv2-sk300", 3),
    ("b1h2s150d128-e4m3-causal_br-sk400-bshd", 3),
    ("b1h2s200d128-e4m3-sk257", 3),
    ("b1h2s100d64-e4m3-causal-zero_head", 2),
)
# For each shape of work tiles of fp8_shapes: head_dim, its index, a problem that has its hidden key tiles, and SMs.
EACH_SHAPE = (
    (64, 0, "b1h2s200d64-e4m3-causal_br-sk400", 2),
    (64, 1, "b1h2s200d64-e4m3-causal_br-sk400", 2),
    (64, 2, "b1h2s200d64-e4m3-causal_br-sk400", 2),
    (128, 0, "b1h2s150d128-e4m3-causal_br-sk300", 2),
    (128, 1, "b1h2s150d128-e4m3-causal_br-sk300", 2),
)
# For each shape, a problem that divides the keys of its last work tiles, and SMs.
SPLIT = (
    (64, 0, "b1h1s500d64-e4m3-sk2000", 7),  # three work tiles in two parts
    (64, 1, "b1h1s140d64-e4m3-sk2000-out_bf16", 7),  # two in three parts
    (64, 2, "b1h1s60d64-e4m3-sk2000", 4),  # one in eight parts, two blocks per SM
    (128, 1, "b1h1s60d128-e4m3-sk1900", 4),
)
FOUR = (
    "b1h3s300d64-e4m3-sk520",
    "b1h2s300d64-e4m3-causal_br-sk400-out_bf16",
    "b2h4s257d64-e4m3-causal-kv2-bshd",
    "b1h2s70d64-e4m3-sk0",
)
FAULT_SHAPE, SPLIT_FAULT_SHAPE = "b1h3s200d64-e4m3-sk300", "b1h1s500d64-e4m3-sk2000"
BARRIERS = ("q_full", "k_full", "v_full", "q_empty", "k_empty", "v_empty", "o_written")
WRONG = {
    "wrong_fp8_keys_in_order": "b1h3s200d64-e4m3",
    "wrong_fp8_p_not_scaled": "b1h2s200d64-e4m3-outlier",
    "wrong_fp8_p_past_448": "b1h2s200d64-e4m3",
    "wrong_fp8_next_v_descale": "b1h3s200d64-e4m3",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_is_right_in_any_order(build: Build, rung: str, order: str) -> None:
    """Output and log-sum-exp are right on tails, masks, grouped heads and heads of zeros."""
    for seed, (shape, sms) in enumerate(SHAPES):
        assert complaints(build(rung), shape, Schedule(seed, sms, ORDERS[order])) == [], shape


@pytest.mark.parametrize("barrier", BARRIERS)
def test_each_barrier_is_needed(build: Build, barrier: str) -> None:
    """Without a barrier, a result is wrong, or the kernel cannot end, in at least one of four orders."""
    assert is_found(build(f"race_fp8_wgmma_{barrier}", 64), FAULT_SHAPE, sms=2)


def test_with_all_barriers_nothing_is_found(build: Build) -> None:
    """Where the faults are looked for, the kernels without one are right."""
    assert not is_found(build("fp8_overlap", 64), FAULT_SHAPE, sms=2)
    assert not is_found(build("fp8_transpose", 64), FAULT_SHAPE, sms=2)
    assert not is_found(build("fp8_split", 64, ONLY_SHAPE=0), SPLIT_FAULT_SHAPE, sms=7)


def test_the_barrier_of_the_transposition_is_needed(build: Build) -> None:
    """V^T that is read before V is in shared memory is wrong."""
    assert is_found(build("race_fp8_transpose_v_written"), FAULT_SHAPE, sms=2)


def test_the_barrier_of_a_divided_work_tile_is_needed(build: Build) -> None:
    """A part that is marked as stored too early is merged before it is complete."""
    assert is_found(build("race_fp8_part_stored", ONLY_SHAPE=0), SPLIT_FAULT_SHAPE, sms=7)


@pytest.mark.parametrize("rung", ["fp8_shapes", "fp8_causal", "fp8_split", "fp8_stages"])
@pytest.mark.parametrize(("head_dim", "index", "shape", "sms"), EACH_SHAPE)
def test_each_shape_is_right(build: Build, rung: str, head_dim: int, index: int, shape: str, sms: int) -> None:
    """The result is right with one to three warpgroups per work tile, some of which see fewer key tiles than others."""
    kernel = build(rung, head_dim, ONLY_SHAPE=index)
    assert complaints(kernel, shape, Schedule(3, sms)) == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rung", ["fp8_four", "fp8_stages"])
@pytest.mark.parametrize("shape", FOUR)
def test_four_warpgroups_are_right(build: Build, shape: str, rung: str, order: str) -> None:
    """So is it with P V in halves, whether all warpgroups see the same key tiles or not, or no key at all."""
    assert complaints(build(rung, 64, ONLY_SHAPE=3), shape, Schedule(3, 2, ORDERS[order])) == []


@pytest.mark.parametrize("rung", ["fp8_split", "fp8_stages"])
@pytest.mark.parametrize(("head_dim", "index", "shape", "sms"), SPLIT)
def test_divided_work_tiles_are_merged(
    build: Build, rung: str, head_dim: int, index: int, shape: str, sms: int
) -> None:
    """The parts of a work tile give the right output, in the first call and in later ones with the same workspace."""
    kernel, case = build(rung, head_dim, ONLY_SHAPE=index), parse_case(f"{shape}-seed0")
    whole = build("fp8_causal", head_dim, ONLY_SHAPE=index)
    assert kernel.workspace_bytes(case, sms) > whole.workspace_bytes(case, sms)  # beside V^T
    assert complaints(kernel, shape, Schedule(1, sms, resident_blocks=20), calls=2) == []
    assert marks_left(kernel) == 0  # the next call would merge the parts of this one


def test_divided_work_tiles_always_have_the_same_bits(build: Build) -> None:
    """The order in which the parts are stored does not matter, nor how many blocks run at the same time."""
    kernel, case = build("fp8_split", 64, ONLY_SHAPE=0), parse_case(f"{SPLIT_FAULT_SHAPE}-seed0")
    (first_out, first_lse), *others = [bits_of(kernel, case, Schedule(seed, 7, 0.5, 1 + 4 * seed)) for seed in range(3)]
    assert all(torch.equal(out, first_out) and torch.equal(lse, first_lse) for out, lse in others)


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_found(build: Build, name: str) -> None:
    """A mistake in the order of keys, in the scale of P or in a descale breaks a bound."""
    assert complaints(build(name, 64), WRONG[name], Schedule()) != []


@pytest.mark.parametrize(
    ("name", "has_one_sign", "is_right"),
    [
        ("fp8_one_accumulator", False, True),
        ("fp8_one_accumulator", True, False),
        ("fp8_overlap", True, True),
        ("fp8_sum", True, True),
    ],
)
def test_one_accumulator_is_wrong_only_if_v_has_one_sign(
    build: Build, name: str, *, has_one_sign: bool, is_right: bool
) -> None:
    """With V full of ones, the losses of all keys add up, unless each key tile is added to float32."""
    case = parse_case("b1h1s64d64-e4m3-sk600-seed0")
    inputs = make_inputs(case, torch.device("cpu"))
    if has_one_sign:
        inputs = inputs._replace(v=torch.full_like(inputs.v, E4M3_MAX, dtype=torch.float32).to(inputs.v.dtype))
    assert (broken_bounds(inputs, *build(name, 64)(case, inputs, Schedule())) == []) == is_right
