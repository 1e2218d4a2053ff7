"""Quantised inputs: descales per head, saturation, special heads, layouts, and guard bands around e4m3."""

from __future__ import annotations

import math

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.guards import ALIGNMENT_BYTES, guard
from pytest_fa.gpu.inputs import Inputs, clone, make_inputs, poisoned_output
from pytest_fa.gpu.quantised import E4M3, dequantised, fill_random, quantise

CPU = torch.device("cpu")


def inputs_of(part: str = "", dtype: str = "e4m3") -> Inputs:
    """The inputs of a case with four heads, which share two heads of K and V."""
    return make_inputs(parse_case(f"b2h4s64d64-{dtype}-kv2{part}-seed0"), CPU)


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of an e4m3 tensor in float32."""
    return tensor.float()


def test_the_largest_element_of_a_head_is_448() -> None:
    """Each head uses the whole range of e4m3, and its rounding error is at most 1/16 of a normal number."""
    values = torch.randn(2, 3, 64, 64) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    numbers, descale = quantise(values)
    assert (numbers.dtype, descale.shape, descale.dtype) == (E4M3, (2, 3), torch.float32)
    assert torch.equal(codes(numbers).abs().amax((2, 3)), torch.full((2, 3), 448.0))
    is_normal = values.abs() / descale[..., None, None] >= 2.0**-6  # before rounding: one below may be rounded up to it
    error = (dequantised(numbers, descale) - values).abs() / values.abs()
    assert float(error[is_normal].max()) <= 1 / 16 + 1e-6


def test_quantised_numbers_quantised_again_stay_the_same() -> None:
    """Numbers and descales do not change a bit, whatever the magnitude of a head."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, 40, 7, 8, generator=generator) * 10 ** torch.rand(50, 40, 1, 1, generator=generator)
    once = quantise(values)
    again = quantise(dequantised(*once))
    assert torch.equal(codes(again[0]), codes(once[0]))
    assert torch.equal(again[1], once[1])


@pytest.mark.parametrize("values", [torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 0, 8)], ids=["zeros", "no keys"])
def test_a_head_of_zeros_has_the_descale_0(values: torch.Tensor) -> None:
    """A head of zeros stays zero and is not divided by zero; neither is one without keys."""
    numbers, descale = quantise(values)
    assert (float(codes(numbers).abs().sum()), descale.tolist()) == (0.0, [[0.0, 0.0]])


def test_adjacent_heads_have_other_descales() -> None:
    """The descales of adjacent heads and batches differ by 10 % or more."""
    descales = inputs_of().descales
    assert descales is not None
    for tensor in (descales.k, descales.v):
        ratios = torch.cat([(tensor[:, 1:] / tensor[:, :-1]).flatten(), (tensor[1:] / tensor[:-1]).flatten()])
        assert float((ratios.log().abs()).min()) > math.log(1.1)


def test_zero_heads() -> None:
    """The first head of Q and K and the last head of V are zero; no other is."""
    q, k, v = inputs_of("-zero_head")[:3]
    zero = [[not bool(codes(tensor[:, head]).any()) for head in range(tensor.shape[1])] for tensor in (q, k, v)]
    assert zero == [[True, False, False, False], [True, False], [False, True]]


def test_an_outlier_takes_the_range_of_its_head() -> None:
    """The outlier becomes 448, and the other numbers of its head are far smaller than those of another head."""
    q, k, v = (codes(tensor) for tensor in inputs_of("-outlier")[:3])
    for tensor, head, other in ((q, 0, 1), (k, 0, 1), (v, 1, 0)):
        assert float(tensor[0, head, 32, 0]) == 448.0
        assert float(tensor[0, head].abs().median()) < 0.2 * float(tensor[0, other].abs().median())


def test_tiny_descales() -> None:
    """The numbers are those of the plain case; the descales are 2^-14, 2^14 and 2^-6 times as large."""
    plain, tiny = inputs_of(), inputs_of("-tiny")
    assert all(torch.equal(codes(a), codes(b)) for a, b in zip(plain[:3], tiny[:3], strict=True))
    assert plain.descales is not None and tiny.descales is not None  # noqa: PT018
    ratios = [float((b / a).mean().log2()) for a, b in zip(plain.descales, tiny.descales, strict=True)]
    assert ratios == pytest.approx([-14, 14, -6], abs=1e-5)


def test_layouts_hold_the_same_numbers() -> None:
    """The layout bshd changes the strides alone."""
    bhsd, bshd = inputs_of(), inputs_of("-bshd")
    assert bshd.q.stride() != bhsd.q.stride()
    assert all(torch.equal(codes(a), codes(b)) for a, b in zip(bhsd[:3], bshd[:3], strict=True))


@pytest.mark.parametrize(("part", "dtype"), [("", torch.float16), ("-out_bf16", torch.bfloat16)])
def test_the_output_is_not_e4m3(part: str, dtype: torch.dtype) -> None:
    """The output has the dtype of the case, and q's shape."""
    inputs = inputs_of(part)
    out = poisoned_output(inputs)
    assert (out.dtype, out.shape, bool(out.isnan().all())) == (dtype, inputs.q.shape, True)


def test_quantised_values_are_quantised_to_themselves() -> None:
    """The exact values, quantised again, are the same numbers with the same descales, and a copy shares no memory."""
    inputs = inputs_of()
    again, copy = inputs.exact().quantised(), clone(inputs)
    assert inputs.descales is not None and again.descales is not None and copy.descales is not None  # noqa: PT018
    assert all(torch.equal(codes(a), codes(b)) for a, b in zip(inputs[:3], again[:3], strict=True))
    for ours, theirs in zip(inputs.descales, again.descales, strict=True):
        assert float((theirs / ours - 1).abs().max()) < 1e-6
    assert not {tensor.data_ptr() for tensor in inputs.parts.values()} & {x.data_ptr() for x in copy.parts.values()}


@pytest.mark.parametrize("count", [40, 41])
def test_guard_bands_of_bytes(count: int, snapshot: SnapshotAssertion) -> None:
    """The bytes beside an e4m3 tensor are NaN, also after an odd number of elements, and one overwritten is found."""
    tensor = torch.full((1, 1, 1, count), 2.0).to(E4M3)
    guarded = guard(tensor)
    start = guarded.tensor.storage_offset()
    beside = torch.as_strided(guarded.tensor, (2,), (count + 1,), start - 1)
    assert (start % ALIGNMENT_BYTES, bool(beside.isnan().all()), guarded.damage) == (0, True, "")
    torch.as_strided(guarded.tensor, (1,), (1,), start + count).fill_(0.0)
    assert snapshot == guarded.damage


def test_random_buffers_in_e4m3_are_finite() -> None:
    """The data of timed calls have no NaN and use the range of e4m3."""
    numbers = codes(fill_random(torch.empty(100_000, dtype=E4M3), torch.Generator().manual_seed(0)))
    assert (bool(numbers.isfinite().all()), float(numbers.abs().max())) == (True, 448.0)
    assert float(numbers.std()) == pytest.approx(100, rel=0.02)
