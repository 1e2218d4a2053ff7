"""Right kernels that rescale O only where P would exceed 2^8: the largest P of a row is then not exactly 1."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pytest_fa.attention.dtypes import Dtype
from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.records.checks import Bound
from tests.unit.judge.mutations import Kernel, Size, problem, simulate

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MAX_USED = 0.98
LAZY = 8.0  # log2 of the largest P
STEP_KEYS = 16
QUERIES = (1, 2, 4, 16)
EACH_DTYPE = pytest.mark.parametrize("dtype", ["fp16", "bf16"])
EACH_LENGTH = pytest.mark.parametrize("seq_k", [64, 512, pytest.param(4096, marks=pytest.mark.nightly)])


def kernels_for(seq_k: int) -> list[Kernel]:
    """Kernels with tiles of 64 or 16 keys, and one that has two steps of 16 keys in each part."""
    splits = max(1, seq_k // (2 * STEP_KEYS))
    return [Kernel(lazy=LAZY), Kernel(STEP_KEYS, lazy=LAZY), Kernel(STEP_KEYS, splits, lazy=LAZY)]


def bounds_of(kernel: Kernel, inputs: Inputs, truth: Truth) -> dict[str, Bound]:
    """The bounds on the output of a simulated kernel."""
    return {bound.name: bound for bound in check_output(simulate(inputs, kernel), truth, "same_precision").bounds}


def most_used(kernel: Kernel, inputs: Inputs, truth: Truth) -> float:
    """The largest fraction that is used of any bound."""
    return max(bound.used or 0.0 for bound in bounds_of(kernel, inputs, truth).values())


def few_queries(dtype: Dtype, head_dim: int, seq_q: int, seq_k: int) -> Inputs:
    """The inputs of 16 heads, four of which share each key head."""
    return make_inputs(parse_case(f"b1h16s{seq_q}d{head_dim}-{dtype}-kv4-sk{seq_k}-seed0"), CPU)


@pytest.mark.parametrize("head_dim", [64, 128])
@EACH_DTYPE
@EACH_LENGTH
def test_few_queries(seq_k: int, dtype: Dtype, head_dim: int) -> None:
    """With 1 to 16 queries, a right kernel uses less than 0.98 of each bound."""
    for seq_q in QUERIES:
        inputs = few_queries(dtype, head_dim, seq_q, seq_k)
        truth = make_truth(inputs)

        assert [used for kernel in kernels_for(seq_k) if (used := most_used(kernel, inputs, truth)) >= MAX_USED] == []


@pytest.mark.parametrize("data", ["large logits", "first keys", "last keys", "shifted", "ones"])
@EACH_DTYPE
def test_few_queries_with_special_values(dtype: Dtype, data: str) -> None:
    """The same if one key has nearly all the weight, and for a V with few keys, a mean or only ones."""
    for seq_q, seq_k in itertools.product(QUERIES, (64, 512)):
        inputs = few_queries(dtype, 64, seq_q, seq_k)
        v = inputs.v.clone()
        match data:
            case "large logits":
                inputs = inputs._replace(scale=30 * inputs.scale)
            case "first keys" | "last keys":
                v[:, :, slice(3, None) if data == "first keys" else slice(-3)] = 0
            case "shifted":
                v += 4
            case "ones":
                v[:] = 1
        inputs = inputs._replace(v=v)
        truth = make_truth(inputs)

        assert [used for kernel in kernels_for(seq_k) if (used := most_used(kernel, inputs, truth)) >= MAX_USED] == []


@EACH_DTYPE
def test_a_row_of_equal_columns_may_be_off_by_one_step(dtype: Dtype) -> None:
    """With a V full of ones, rounding a P that outweighs all others makes O 1 - ulp / 2 in all columns of a row."""
    inputs = few_queries(dtype, 64, 16, 512)
    inputs = inputs._replace(v=torch.ones_like(inputs.v), scale=8 * inputs.scale)
    truth = make_truth(inputs)
    kernel = Kernel(STEP_KEYS, lazy=LAZY)
    out = simulate(inputs, kernel)
    steps = (1 - out.double()).amax(-1) / (torch.finfo(out.dtype).eps / 2)

    assert float(steps.max()) == 1.0
    assert most_used(kernel, inputs, truth) < MAX_USED
    out[0, 0, 0] = 1 - torch.finfo(out.dtype).eps
    row_rms = next(bound for bound in check_output(out, truth, "same_precision").bounds if bound.name == "row rms")
    assert not row_rms.holds


def test_a_single_row_of_equal_columns_may_be_off_by_one_step() -> None:
    """The same where the row is the whole output, and float64 has its exact value as 1 - 2^-53."""
    inputs = make_inputs(parse_case("b1h2s1d64-fp16-sk256-seed1742"), CPU)
    inputs = inputs._replace(v=torch.ones_like(inputs.v), scale=6 * inputs.scale)
    kernel = Kernel(STEP_KEYS, lazy=LAZY)

    assert float(simulate(inputs, kernel).double().min()) == 1 - 2.0**-11
    assert most_used(kernel, inputs, make_truth(inputs)) < MAX_USED


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@EACH_DTYPE
@EACH_LENGTH
def test_many_queries(seq_k: int, dtype: Dtype, causal: bool) -> None:  # noqa: FBT001  # a parameter
    """The same with as many queries as keys."""
    inputs = problem(Size(seq_k, causal), dtype, "same_precision")
    truth = make_truth(inputs)

    assert [used for kernel in kernels_for(seq_k) if (used := most_used(kernel, inputs, truth)) >= MAX_USED] == []


def test_a_row_with_one_key_needs_room() -> None:
    """A kernel that was right and blamed: two queries, of which one has a key with 0.88 of the sum of p^2.

    Of each block of 256 keys, a warp computes steps w and w + 8.
    """
    inputs = make_inputs(parse_case("b4h32s2d64-fp16-kv8-sk512-seed0"), CPU)
    order = torch.arange(512).view(2, 2, 8, STEP_KEYS).transpose(1, 2).flatten()
    inputs = inputs._replace(k=inputs.k[:, :, order], v=inputs.v[:, :, order])
    truth = make_truth(inputs)
    kernel = Kernel(STEP_KEYS, splits=16, lazy=LAZY)

    without_room = bounds_of(kernel, inputs, truth._replace(norm4_size=None))

    assert {name for name, bound in without_room.items() if not bound.holds} == {"gain"}
    assert without_room["gain"].value == pytest.approx(3.062e-4, rel=1e-3)
    assert without_room["gain"].allowed == pytest.approx(2.935e-4, rel=1e-3)
    assert most_used(kernel, inputs, truth) < MAX_USED


@pytest.mark.parametrize("case", ["s1d128-bf16-sk5", "s2d128-bf16-sk16"])
def test_a_kernel_may_begin_with_the_sink_as_the_maximum(case: str) -> None:
    """The largest P is then rounded also in the first tile, unless a key exceeds the sink by far."""
    inputs = make_inputs(parse_case(f"b1h16{case}-sink-seed0"), CPU)
    q, k, v = (tensor.float() for tensor in inputs[:3])
    sink = inputs.word("sink").view(-1, 1, 1)
    s = inputs.scale * q @ k.mT
    largest = s.amax(-1, keepdim=True)
    m = torch.where(largest - sink > LAZY * math.log(2), largest, sink)
    p = torch.exp(s - m)
    row_sum = p.sum(-1, keepdim=True) + torch.exp(sink - m)
    out = (p.to(inputs.q.dtype).float() @ v / row_sum).to(inputs.q.dtype)

    bounds = check_output(out, make_truth(inputs), "same_precision").bounds

    assert max(bound.used or 0.0 for bound in bounds) < MAX_USED


@pytest.mark.parametrize("factor", [1.001, 0.999])
@pytest.mark.parametrize("lazy", [0.0, LAZY])
def test_wrong_denominator_is_rejected(lazy: float, factor: float) -> None:
    """In fp16, a denominator that is off by 1e-3 is rejected with few queries as with many."""
    for seq_q, seq_k in itertools.product(QUERIES, (64, 512)):
        inputs = few_queries("fp16", 64, seq_q, seq_k)
        kernel = Kernel(STEP_KEYS, lazy=lazy, denominator_factor=factor)

        assert most_used(kernel, inputs, make_truth(inputs)) > 1.1, (seq_q, seq_k)


@EACH_DTYPE
@EACH_LENGTH
def test_lost_key_is_rejected(seq_k: int, dtype: Dtype) -> None:
    """A lost key is rejected with few queries, also in a kernel that rescales lazily."""
    for seq_q, lazy in itertools.product(QUERIES, (0.0, LAZY)):
        inputs = few_queries(dtype, 64, seq_q, seq_k)

        assert most_used(Kernel(STEP_KEYS, lazy=lazy, keys_lost=1), inputs, make_truth(inputs)) > 1.1, seq_q


def test_rows_with_few_keys_hide_no_wrong_denominator() -> None:
    """Under a causal mask, the largest rows see few keys and need no room: bf16 rejects a denominator off by 1e-3."""
    inputs = problem(Size(512, causal=True), "bf16", "same_precision")

    assert most_used(Kernel(denominator_factor=1.001), inputs, make_truth(inputs)) > 1.1
