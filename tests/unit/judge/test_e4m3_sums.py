"""Sums of e4m3 products in 13 bits, compared with sums that are written out in whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from pytest_fa.gpu.quantised import E4M3, E4M3_MAX
from tests.unit.judge.e4m3_sums import KEPT_BITS, TERMS_PER_STEP, exponents, hopper_matmul

pytestmark = pytest.mark.usefixtures("one_thread")


def exponent_of(number: float) -> int:
    """The exponent of a float that is not zero."""
    return math.frexp(number)[1] - 1


def cut(number: Fraction, exponent: int) -> Fraction:
    """A number whose bits after the 13th behind the binary point of `exponent` are cut off."""
    unit = Fraction(2) ** (exponent - KEPT_BITS)
    return math.trunc(number / unit) * unit


def sum_of(a: list[float], b: list[float], accumulator: float) -> float:
    """One sum in exact arithmetic, an instruction at a time."""
    total = Fraction(accumulator)
    for first in range(0, len(a), TERMS_PER_STEP):
        step = slice(first, first + TERMS_PER_STEP)
        pairs = [(x, y) for x, y in zip(a[step], b[step], strict=True) if x and y]
        largest = [max(exponent_of(x), -6) + max(exponent_of(y), -6) for x, y in pairs]
        largest += [exponent_of(float(total))] if total else []
        addends = [total, *(Fraction(x) * Fraction(y) for x, y in pairs)]
        total = sum((cut(addend, max(largest)) for addend in addends), Fraction(0)) if largest else total
        total = cut(total, exponent_of(float(total))) if total else total
    return float(total)


@pytest.mark.parametrize("spread", [0.0, 2.0], ids=["similar sizes", "many sizes"])
@pytest.mark.parametrize("accumulator", [0.0, 0.01, 1e5])
def test_sums_are_those_of_whole_numbers(accumulator: float, spread: float) -> None:
    """Sums of 64 products of many sizes are equal bit by bit to those in exact arithmetic."""
    random = torch.Generator().manual_seed(0)
    shapes = ((1, 1, 40, 64), (1, 1, 64, 5))
    drawn = [torch.randn(shape, generator=random) for shape in shapes]
    sizes = [torch.exp(spread * torch.randn(shape, generator=random)) for shape in shapes]
    a, b = ((x * size).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float() for x, size in zip(drawn, sizes, strict=True))
    c = accumulator * torch.randn((1, 1, 40, 5), generator=random)

    rows, columns = a[0, 0].tolist(), b[0, 0].T.tolist()
    want = [[sum_of(rows[i], columns[j], float(c[0, 0, i, j])) for j in range(5)] for i in range(40)]

    assert hopper_matmul(a, b, c)[0, 0].tolist() == want


def test_what_is_cut_off_depends_on_the_largest_addend() -> None:
    """Beside 2^13, ones are kept and halves are lost; beside 2^14, ones are lost as well."""
    a = torch.ones(1, 1, 1, 32)
    for accumulator, factor, gain in ((2.0**13, 1.0, 32.0), (2.0**13, 0.5, 0.0), (2.0**14, 1.0, 0.0)):
        total = hopper_matmul(a, torch.full((1, 1, 32, 1), factor), torch.full((1, 1, 1, 1), accumulator))
        assert float(total) == accumulator + gain


def test_exponents_of_subnormal_numbers_are_the_smallest() -> None:
    """Numbers below 2^-6 have the exponent of 2^-6, and zero has one below that of any product."""
    numbers = torch.tensor([448.0, -1.5, 2.0**-6, 2.0**-9, 0.0])
    assert exponents(numbers).tolist() == [8, 0, -6, -6, -60]
