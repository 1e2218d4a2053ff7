"""The long kernel for sequences of any lengths, padded, behind one another or in pages, emulated on the CPU."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.gpu.inputs import make_inputs
from tests.emulator.conftest import Build, broken_bounds, complaints
from tests.emulator.emulated import Schedule
from tests.tiers import nightly_after

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

RUNG, SORTED = "long_ragged", "long_sorted"
# The patterns have sequences with 0, 1, 63 to 65 and 127 to 129 queries or keys.
SHAPES = (
    "b9h2s70d64-fp16-causal_br-kv1-var2-thd",
    "b9h4s150d64-fp16-causal_br-kv2-var2-thd",
    "b9h2s150d64-fp16-sk200-var1",
    "b9h2s150d64-fp16-var3",
    "b9h2s257d64-fp16-causal-sk150-var2-thd",  # sequences with fewer keys than queries
    "b4h4s333d64-fp16-causal_br-kv1-sk150-var3-bshd",
    "b5h2s300d64-fp16-sk400-var4",
    "b2h2s130d64-fp16-causal_br-sk256-var5",
    "b9h4s150d64-fp16-win37_21-kv2-sk200-var2-sink-thd",
    "b9h2s150d64-fp16-winm8_57-sk333-var3-sink",
    "b9h2s150d64-fp16-wino_5-sk129-var3-thd",
    "b9h2s150d64-fp16-win64_o-sk129-var2-thd",
    "b9h2s150d64-fp16-var2-scalem0p7-thd",
    "b2h2s70d64-fp16-sk200-sink",  # without lengths
    "b1h2s70d64-fp16-sk0",
    "b9h2s70d64-fp16-causal_br-kv1-sk160-var1-page16",
    "b9h4s150d64-fp16-causal_br-kv2-sk256-var2-page64hnd-thd",
    "b4h4s70d64-fp16-win37_21-kv2-sk400-var4-page16hnd-sink-bshd",
    "b9h2s70d128-fp16-causal_br-kv1-sk256-var3-page16-thd",
    "b4h2s150d128-fp16-kv1-sk512-var1-page256",
    "b9h2s257d128-fp16-causal_br-kv1-sk300-var2-thd",
    "b9h4s129d128-fp16-kv2-var3-thd",
    "b5h2s200d128-fp16-causal_br-sk333-var1-bshd",
    "b9h2s150d128-fp16-win37_21-kv1-sk200-var3-sink-thd",
)
MISTAKES = ("wrong_long_tail_not_cleared", "wrong_long_stores_whole")


@pytest.mark.parametrize("number", nightly_after(1, range(len(SHAPES))))
def test_it_is_right(build: Build, number: int) -> None:
    """Output and log-sum-exp are right, and other rows are not written, whatever rows behind a sequence hold."""
    case = parse_case(f"{SHAPES[number]}-seed0")
    assert complaints(build(RUNG, case.head_dim), SHAPES[number], Schedule(number, 2, early=number % 3 / 2)) == []


@pytest.mark.parametrize("number", nightly_after(1, range(len(SHAPES))))
def test_sorted_work_tiles_are_computed_once(build: Build, number: int) -> None:
    """Results are right with 1 to 7 blocks: a work tile that no block computes would leave its poison."""
    kernel = build(SORTED, parse_case(f"{SHAPES[number]}-seed0").head_dim)
    assert complaints(kernel, SHAPES[number], Schedule(number, 1 + number % 7, early=number % 3 / 2)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("sms", [1, 13, 64])
@pytest.mark.parametrize(
    "shape",
    [
        "b75h2s40d64-fp16-causal_br-kv1-var2-thd",
        "b2h1s2500d64-fp16-win37_0-var3-thd",
        "b1100h1s2d64-fp16-var3-thd",  # too many to be sorted
        "b200h6s3d64-fp16-var3-thd",  # one block has too many
    ],
)
def test_many_work_tiles_are_computed_once(build: Build, shape: str, sms: int) -> None:
    """So they are with many sequences, and where they are too many to be sorted."""
    assert complaints(build(SORTED, 64, ONLY_SHAPE=3), shape, Schedule(sms, sms)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("tile", range(5))
def test_it_is_right_with_each_shape_of_work_tiles(build: Build, tile: int) -> None:
    """So it is with tiles of 64 to 256 queries, and of 64 or 128 keys."""
    kernel = build(RUNG, 64, ONLY_SHAPE=tile)
    shapes = [shape for shape in SHAPES if "d64" in shape]
    broken = {shape: complaints(kernel, shape, Schedule(tile, 3, early=tile % 3 / 2)) for shape in shapes}
    assert broken == {shape: [] for shape in shapes}


@pytest.mark.nightly
def test_the_longest_lengths_may_be_larger(build: Build) -> None:
    """A call with an odd seed says 64 rows more than the longest sequence has."""
    case = parse_case("b9h2s70d64-fp16-causal_br-kv1-sk150-var2-thd-seed1")
    inputs = make_inputs(case, torch.device("cpu"))
    assert broken_bounds(inputs, *build(RUNG, 64)(case, inputs, Schedule())) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(build: Build, name: str) -> None:
    """A kernel with one mistake is wrong where the rung is right."""
    assert complaints(build(name), SHAPES[0], Schedule()) != []


@pytest.mark.nightly
def test_each_claim_is_right(build: Build) -> None:
    """The cases of a default run are right, which have any two of the claims."""
    kernel = build(RUNG, dtypes=("fp16", "bf16"))
    cases = claim_cases(kernel.variant, ())
    broken = {case.id: complaints(kernel, case.shape_id, Schedule()) for case in cases}
    assert (broken, len(cases) > len(SHAPES)) == ({case.id: [] for case in cases}, True)
