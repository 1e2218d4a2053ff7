"""Truth agrees with torch's SDPA in float64, and the same-precision reference rounds where it should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge import truth
from pytest_fa.judge.truth import make_truth

CPU = torch.device("cpu")


def inputs_of(case: str) -> Inputs:
    """The inputs of a case."""
    return make_inputs(parse_case(case), CPU)


def visible(inputs: Inputs) -> torch.Tensor | None:
    """The mask by its definition: query i sees key j if j <= i + shift; None without a mask."""
    seq_q, seq_k = inputs.q.shape[2], inputs.k.shape[2]
    ones = torch.ones(seq_q, seq_k, dtype=torch.bool)
    shift = {"none": None, "top_left": 0, "bottom_right": seq_k - seq_q}[inputs.causal]
    return None if shift is None else ones.tril(shift)


@pytest.mark.parametrize(
    "case",
    [
        "b2h3s65d64-fp16-seed0",
        "b1h2s17d128-bf16-seed1",
        "b1h2s1d64-fp16-seed0",
        "b1h2s48d64-fp16-causal-seed0",
        "b1h2s48d64-fp16-causal-sk80-seed0",
        "b1h2s80d64-fp16-causal-sk48-seed0",
        "b1h2s48d64-fp16-causal_br-sk80-seed0",
        "b1h4s33d64-fp16-kv2-seed0",
        "b1h6s33d64-bf16-causal-kv1-seed0",
        "b2h2s40d64-fp16-bshd-seed0",
    ],
)
def test_truth_is_attention(case: str) -> None:
    """Truth equals torch's SDPA on the same inputs in float64, for every mask, head grouping and layout."""
    inputs = inputs_of(case)
    q, k, v = (tensor.double() for tensor in inputs[:3])

    expected = scaled_dot_product_attention(
        q, k, v, attn_mask=visible(inputs), scale=inputs.scale, enable_gqa=q.shape[1] != k.shape[1]
    )

    result = make_truth(inputs)
    assert result.out.dtype == torch.float64
    torch.testing.assert_close(result.out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("factor", [0.0, -1.0, 30.0, 1000.0])
def test_odd_scales(factor: float) -> None:
    """With zero, negative and large scales, truth equals SDPA and nothing overflows."""
    inputs = inputs_of("b1h2s40d64-fp16-seed0")
    inputs = inputs._replace(scale=inputs.scale * factor)
    q, k, v = (tensor.double() for tensor in inputs[:3])

    result = make_truth(inputs)

    expected = scaled_dot_product_attention(q, k, v, scale=inputs.scale)
    torch.testing.assert_close(result.out, expected, rtol=0, atol=1e-12)
    assert bool(result.same_precision.isfinite().all())


def test_rows_that_see_no_key_are_zero() -> None:
    """With 80 queries and 48 keys under a bottom-right mask, the first 32 rows see no key and are zero."""
    inputs = inputs_of("b1h2s80d64-fp16-causal_br-sk48-seed0")

    result = make_truth(inputs)

    for out in (result.out, result.same_precision):
        assert [bool((out[:, :, row] == 0).all()) for row in (0, 31, 32, 79)] == [True, True, False, False]


def test_no_keys_at_all() -> None:
    """If there are no keys, every row is zero."""
    inputs = inputs_of("b1h2s40d64-fp16-seed0")
    inputs = inputs._replace(k=inputs.k[:, :, :0], v=inputs.v[:, :, :0])

    result = make_truth(inputs)

    assert [tuple(out.shape) for out in (result.out, result.same_precision)] == [(1, 2, 40, 64)] * 2
    assert [float(out.abs().max()) for out in (result.out, result.same_precision)] == [0.0, 0.0]


@pytest.mark.parametrize(
    "case", ["b2h2s70d64-fp16-seed0", "b1h2s70d64-bf16-causal-seed0", "b1h4s70d64-fp16-causal_br-kv2-sk90-seed0"]
)
@pytest.mark.parametrize("rows", [1, 7, 69])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, case: str, rows: int) -> None:
    """Truth and reference do not depend on the number of queries per block."""
    inputs = inputs_of(case)
    whole = make_truth(inputs)

    monkeypatch.setattr(truth, "rows_per_block", lambda _: rows)
    blocks = make_truth(inputs)

    torch.testing.assert_close(blocks.out, whole.out, rtol=0, atol=1e-14)
    torch.testing.assert_close(blocks.same_precision, whole.same_precision, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("case", "budget", "rows"),
    [
        ("b1h2s64d64-fp16-seed0", 2**27, 64),
        ("b1h2s64d64-fp16-seed0", 8 * 2 * 64 * 10, 10),
        ("b1h2s64d64-fp16-seed0", 1, 1),
        ("b2h2s64d64-fp16-sk32-seed0", 8 * 4 * 32 * 3, 3),
    ],
)
def testrows_per_block(monkeypatch: pytest.MonkeyPatch, case: str, budget: int, rows: int) -> None:
    """The float64 scores of a block stay within the budget; a block has at least one row and at most seq_q rows."""
    monkeypatch.setitem(truth.BLOCK_BYTES, "cpu", budget)

    assert truth.rows_per_block(inputs_of(case)) == rows


def one_row(inputs: Inputs, row: int, rounds: tuple[str, ...]) -> torch.Tensor:
    """One row of the same-precision reference for batch 0 and head 0, computed from its definition."""

    def rounded(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor.to(inputs.q.dtype).double() if name in rounds or name == "always" else tensor

    q, k, v = (tensor[0, 0].double() for tensor in inputs[:3])
    s = rounded(rounded(q[row] * inputs.scale, "q") @ k.T, "s")
    p = (s - s.max()).exp()
    if "p" in rounds:
        return rounded(rounded(p / p.sum(), "always") @ v, "always")
    return rounded(rounded(p, "always") @ v / p.sum(), "always")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rounds", [(), ("q",), ("s",), ("p",), ("q", "s"), ("q", "s", "p")])
def test_same_precision_reference_rounds_where_it_should(dtype: str, rounds: Any) -> None:
    """The same-precision reference rounds P, the result and exactly what the manifest declares."""
    inputs = inputs_of(f"b1h1s40d128-{dtype}-seed3")

    result = make_truth(inputs, rounds)

    for row in (0, 17, 39):
        torch.testing.assert_close(result.same_precision[0, 0, row], one_row(inputs, row, rounds), rtol=0, atol=0)


@pytest.mark.parametrize("rounds", [("q",), ("s",), ("p",)])
def test_declared_roundings_do_not_change_truth(rounds: Any) -> None:
    """Roundings that a manifest declares change the same-precision reference and do not change truth."""
    inputs = inputs_of(
        "b1h2s64d128-fp16-seed0"
    )  # not D = 64: 1/sqrt(64) is a power of two, so that Q * scale would be exact

    plain, declared = make_truth(inputs), make_truth(inputs, rounds)

    assert torch.equal(plain.out, declared.out)
    assert not torch.equal(plain.same_precision, declared.same_precision)


@pytest.mark.parametrize("case", ["b2h2s70d64-fp16-seed0", "b1h4s70d64-bf16-causal_br-kv2-sk90-seed0"])
def test_spread_by_its_definition(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The spread is as its fields say, also in several blocks, and does not change truth."""
    inputs = inputs_of(case)
    monkeypatch.setattr(truth, "rows_per_block", lambda _: 7)
    q, k, v = (tensor.double() for tensor in inputs[:3])
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * inputs.scale
    mask = visible(inputs)
    p = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)

    result = make_truth(inputs, with_spread=True)

    assert result.spread is not None
    torch.testing.assert_close(result.spread.of_sum, (p**2 @ v**2).sqrt(), rtol=1e-12, atol=0)
    along_row = torch.einsum("bhqk,bhkd,bhqd->bhqk", p, v, p @ v).square().sum(-1)
    torch.testing.assert_close(result.spread.along_row, along_row, rtol=1e-12, atol=0)
    assert torch.equal(result.spread.largest_v[..., 0, 0], v.abs().flatten(2).max(-1).values)
    assert torch.equal(result.out, make_truth(inputs).out)


@pytest.mark.parametrize("case", ["b2h2s70d64-fp16-seed0", "b1h4s70d64-bf16-causal_br-kv2-sk90-seed0"])
def test_row_size_by_its_definition(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The sizes of a row are the 2-norm and the 4-norm of p, times the RMS of V; in the first tile, the latter is 0."""
    inputs = inputs_of(case)
    monkeypatch.setattr(truth, "rows_per_block", lambda _: 7)
    q, k, v = (tensor.double() for tensor in inputs[:3])
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    mask = visible(inputs)
    scores = q @ k.transpose(2, 3) * inputs.scale
    p = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)

    result = make_truth(inputs)

    rms_v = v.square().mean((-1, -2)).sqrt()[..., None]
    torch.testing.assert_close(result.row_size, p.square().sum(-1).sqrt() * rms_v, rtol=1e-12, atol=0)
    norm4 = (p.pow(4).sum(-1) ** 0.25).where((p[..., 16:] > 0).any(-1), 0.0)
    torch.testing.assert_close(result.norm4_size, norm4 * rms_v, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("case", "rounds_largest"), [("sk16", False), ("sk16-sink", True), ("win7_0-sk90", True)])
def test_the_largest_p_is_rounded_after_a_sink_and_where_tiles_may_begin_anywhere(
    case: str, *, rounds_largest: bool
) -> None:
    """With 16 keys from the first one on, the largest p is 1, unless there is a sink."""
    sizes = make_truth(inputs_of(f"b1h8s9d64-fp16-{case}-seed0")).norm4_size
    assert sizes is not None
    assert bool((sizes > 0).any()) == rounds_largest


def test_spread_is_optional() -> None:
    """Without `with_spread`, truth has no spread."""
    assert make_truth(inputs_of("b1h1s8d64-fp16-seed0")).spread is None


def test_spread_without_keys() -> None:
    """If there are no keys, the spread is zero."""
    inputs = inputs_of("b1h2s8d64-fp16-seed0")

    result = make_truth(inputs._replace(k=inputs.k[:, :, :0], v=inputs.v[:, :, :0]), with_spread=True)

    assert result.spread is not None
    assert [float(tensor.abs().max()) for tensor in result.spread] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("dtype", "digits"), [("fp16", 11), ("bf16", 8)])
def test_same_precision_reference_has_the_error_of_its_dtype(dtype: str, digits: int) -> None:
    """The reference's largest error is not zero and below two roundings of the largest value."""
    inputs = inputs_of(f"b1h2s128d64-{dtype}-seed0")

    result = make_truth(inputs)

    error = float((result.same_precision - result.out).abs().max())
    assert 0 < error < 2 * 2.0 ** (math.ceil(math.log2(float(result.out.abs().max()))) - digits)
