"""The kernels for long sequences, emulated on the CPU.

They are right in any order of copies and threads, and need each of their barriers.
"""

from __future__ import annotations

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from tests.emulator.conftest import ORDERS, Build, bits_of, complaints, is_found, marks_left
from tests.emulator.emulated import Schedule

pytestmark = [pytest.mark.needs_nvcc, pytest.mark.nightly]  # it needs the headers of CUDA

RUNGS = (
    "long_block",
    "long_producer",
    "long_persistent",
    "long_store",
    "long_ring",
    "long_turns",
    "long_overlap",
    "long_sum",
    "long_max",
    "long_shapes",
    "long_causal",
    "long_fitted",
    "long_list",
    "long_next_q",
    "long_tail",
    "long_from_end",
    "long_heads_tail",
)
# Shapes, and the number of SMs.
SHAPES = (
    ("b1h2s1d64-fp16-sk127", 2),  # one query, one key tile
    ("b1h2s130d64-fp16-sk0", 2),  # no key
    ("b1h3s300d64-fp16-causal-sk1100", 2),
    ("b1h2s700d64-fp16-causal_br-sk300", 2),  # the first queries see no key
    ("b2h4s333d64-fp16-kv2-sk500", 5),
    ("b1h2s257d128-fp16-causal", 2),
    ("b1h2s400d128-fp16-causal_br-sk700-bshd", 5),
    ("b1h3s300d128-fp16-sk513", 5),
    # The last query of a warpgroup sees the first key of a key tile: of 64 or 128 keys, and of 80.
    ("b1h2s130d64-fp16-causal_br-sk195", 2),
    ("b1h2s200d128-fp16-causal_br-sk217", 2),
    # Heads that end inside a box of 64 columns.
    ("b1h2s400d80-fp16-causal_br-sk700-bshd", 5),
    ("b1h2s257d96-fp16-causal", 2),
    ("b2h4s333d112-fp16-kv2-sk500", 5),
    ("b1h2s130d96-fp16-sk0", 2),
)
# The keys of the last work tiles are divided here, into 8, 2 and 3 parts.
SPLIT = (("b1h3s576d{}-fp16-sk1500", 8), ("b1h1s384d{}-fp16-sk2000", 5), ("b1h2s130d{}-fp16-sk2500", 7))
# With three warpgroups in long_heads_tail: two would take nearly as long, without parts.
SPLIT_RUNGS = (("long_tail", 128, -1), ("long_from_end", 128, -1), ("long_heads_tail", 96, 1))
FAULT_SHAPE, SPLIT_FAULT_SHAPE = "b1h3s700d64-fp16", "b1h2s130d{}-fp16-sk2500"
FAULTS = ("q_full", "k_full", "v_full", "q_empty", "k_empty", "v_empty", "o_written")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_is_right_in_any_order(build: Build, rung: str, order: str) -> None:
    """Output and log-sum-exp are right on tails, masks and grouped heads, with more or fewer work tiles than SMs."""
    head_dims = build(rung).variant.supports.head_dim
    for seed, (shape, sms) in enumerate(SHAPES):
        if parse_case(f"{shape}-seed0").head_dim in head_dims:
            assert complaints(build(rung), shape, Schedule(seed, sms, ORDERS[order])) == [], shape


@pytest.mark.parametrize("work_tiles", [4, 5, 6])
@pytest.mark.parametrize("rung", RUNGS)
def test_as_many_work_tiles_as_multiprocessors(build: Build, rung: str, work_tiles: int) -> None:
    """Results are right if there is one work tile less than multiprocessors, as many, or one more."""
    kernel = build(rung)
    shape = f"b1h{work_tiles}s60d{min(kernel.variant.supports.head_dim)}-fp16-causal_br-sk200"
    assert complaints(kernel, shape, Schedule(2, sms=5)) == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rung", "head_dim", "only_shape"), SPLIT_RUNGS)
@pytest.mark.parametrize(("shape", "sms"), SPLIT)
def test_divided_work_tiles_are_merged(
    build: Build, rung: str, head_dim: int, only_shape: int, shape: str, sms: int, order: str
) -> None:
    """The parts of a work tile give the right output, in the first call and in later ones with the same workspace."""
    kernel, name = build(rung, ONLY_SHAPE=only_shape), shape.format(head_dim)
    assert kernel.workspace_bytes(parse_case(f"{name}-seed0"), sms) > 0
    assert complaints(kernel, name, Schedule(1, sms, ORDERS[order], resident_blocks=20), calls=3) == []
    assert marks_left(kernel) == 0  # the next call would merge the parts of this one


@pytest.mark.parametrize(
    ("rung", "head_dim"),
    [("long_tail", 128), ("long_from_end", 128), *(("long_heads_tail", head_dim) for head_dim in (80, 96, 112))],
)
@pytest.mark.parametrize("shape", [0, 1, 2])
def test_work_tiles_of_each_size_can_be_divided(build: Build, rung: str, head_dim: int, shape: int) -> None:
    """The result is right with two, three and one warpgroups per work tile."""
    kernel, name = build(rung, head_dim, ONLY_SHAPE=shape), f"b1h1s384d{head_dim}-fp16-sk2000"
    assert kernel.workspace_bytes(parse_case(f"{name}-seed0"), 9) > 0
    assert complaints(kernel, name, Schedule(2, sms=9, resident_blocks=20), calls=2) == []


# By what decides: the problem, and the index of the shape that long_causal and long_fitted choose.
CHOICES = {"starts": ("b1h1s192d128-fp16-causal", 1, 2), "rates": ("b1h1s896d128-fp16-causal", 1, 0)}


@pytest.mark.parametrize("times", CHOICES)
def test_each_rung_chooses_by_its_own_times(build: Build, times: str) -> None:
    """For this call, the times of long_fitted choose another shape than those of long_causal."""
    shape, *expected = CHOICES[times]
    case, schedule = parse_case(f"{shape}-seed0"), Schedule(0, sms=2)
    bits = {index: bits_of(build("long_causal", 128, ONLY_SHAPE=index), case, schedule)[0] for index in range(3)}
    chosen = [bits_of(build(rung, 128), case, schedule)[0] for rung in ("long_causal", "long_fitted")]
    assert [[index for index in bits if torch.equal(bits[index], out)] for out in chosen] == [
        [index] for index in expected
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rung", "head_dim"), [("long_from_end", 64), ("long_from_end", 128), ("long_heads_tail", 96)])
def test_listed_work_tiles_are_right(build: Build, rung: str, head_dim: int, order: str) -> None:
    """By calculation, a list of these work tiles takes less time than dealing, so that it is kept."""
    kernel, schedule = build(rung, head_dim, ONLY_SHAPE=1), Schedule(1, 3, ORDERS[order])
    assert complaints(kernel, f"b1h5s300d{head_dim}-fp16-causal", schedule) == []
    assert kernel.took("ListedTiles")


def test_work_tiles_are_dealt_to_more_blocks_than_a_list_has(build: Build) -> None:
    """The result is right on a GPU with more SMs than the lists of long_list have blocks."""
    kernel = build("long_list", 64, ONLY_SHAPE=0)
    assert complaints(kernel, "b1h77s386d64-fp16-causal", Schedule(1, sms=133)) == []
    assert not kernel.took("ListedTiles")


@pytest.mark.parametrize(("rung", "head_dim", "only_shape"), SPLIT_RUNGS)
def test_divided_work_tiles_always_have_the_same_bits(build: Build, rung: str, head_dim: int, only_shape: int) -> None:
    """The order in which the parts are stored does not matter, nor how many blocks run at the same time."""
    kernel, case = build(rung, ONLY_SHAPE=only_shape), parse_case(f"{SPLIT[0][0].format(head_dim)}-seed0")
    (first_out, first_lse), *others = [bits_of(kernel, case, Schedule(seed, 8, 0.5, 1 + 4 * seed)) for seed in range(4)]
    assert all(torch.equal(out, first_out) and torch.equal(lse, first_lse) for out, lse in others)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_barrier_is_needed(build: Build, fault: str) -> None:
    """Without a barrier, a result is wrong, or the kernel cannot end, in at least one of four orders."""
    assert is_found(build(f"race_long_{fault}"), FAULT_SHAPE, sms=2)


def test_with_all_barriers_nothing_is_found(build: Build) -> None:
    """Where the faults are looked for, the kernels without one are right."""
    assert not is_found(build("long_overlap", 64), FAULT_SHAPE, sms=2)
    for rung, head_dim, only_shape in SPLIT_RUNGS:
        kernel = build(rung, head_dim, ONLY_SHAPE=only_shape)
        assert not is_found(kernel, SPLIT_FAULT_SHAPE.format(head_dim), sms=7)


@pytest.mark.parametrize(("rung", "head_dim", "only_shape"), SPLIT_RUNGS)
def test_the_barrier_of_a_divided_work_tile_is_needed(build: Build, rung: str, head_dim: int, only_shape: int) -> None:
    """A part that is marked as stored too early is merged before it is complete."""
    kernel = build(rung, head_dim, ONLY_SHAPE=only_shape, OMIT_BARRIER="PART_STORED")
    assert is_found(kernel, SPLIT_FAULT_SHAPE.format(head_dim), sms=7)
