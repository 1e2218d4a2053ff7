"""Sums of e4m3 products as Hopper's matrix units compute them, in torch.

An instruction adds 32 products and the accumulator.  All 33 addends are aligned to the largest exponent among them,
where the exponent of a product is the sum of its factors' exponents.  Each addend is cut off toward zero, 13 bits after
the binary point of that exponent.  The rest is added exactly, and 13 bits after the leading one of the sum are kept.

This is the model of MMA-Sim (arXiv 2511.10909).  On an H200, kernels are right and wrong where it says so.
"""

from __future__ import annotations

import torch

TERMS_PER_STEP = 32  # products that one instruction adds
KEPT_BITS = 13  # after the leading one
_ROWS_PER_BLOCK = 1024  # so that what a step works on stays in the cache
_SMALLEST_EXPONENT = -6  # of an e4m3 number; those below it are subnormal
_OF_ZERO = -60  # an exponent below that of any product that is not zero
_DROPPED_BITS = 23 - KEPT_BITS  # of a float32


def hopper_matmul(
    a: torch.Tensor,  # [batch, heads, rows, terms] e4m3 numbers in float32
    b: torch.Tensor,  # [batch, heads, terms, columns] e4m3 numbers in float32
    accumulator: torch.Tensor | None = None,  # [batch, heads, rows, columns] float32
) -> torch.Tensor:
    """The accumulator plus a @ b, [batch, heads, rows, columns] float32; without one, a @ b."""
    batch, heads, rows, terms = a.shape
    out = a.new_zeros((batch, heads, rows, b.shape[3])) if accumulator is None else accumulator.clone()
    of_a, of_b = exponents(a), exponents(b)
    for i, j in ((i, j) for i in range(batch) for j in range(heads)):
        for first_row in range(0, rows, _ROWS_PER_BLOCK):
            block = slice(first_row, first_row + _ROWS_PER_BLOCK)
            own, of_own = a[i, j, block].T.contiguous(), of_a[i, j, block].T.contiguous()
            total = out[i, j, block].T.contiguous()
            for first in range(0, terms, TERMS_PER_STEP):
                step = slice(first, first + TERMS_PER_STEP)
                total = _step(own[step], b[i, j, step], of_own[step], of_b[i, j, step], total)
            out[i, j, block] = total.T
    return out


def exponents(numbers: torch.Tensor) -> torch.Tensor:
    """The exponent of each e4m3 number, as int8."""
    exponent = (torch.frexp(numbers).exponent - 1).clamp_min(_SMALLEST_EXPONENT)
    return exponent.masked_fill(numbers == 0, _OF_ZERO).to(torch.int8)


def _step(
    a: torch.Tensor,  # [terms, rows]
    b: torch.Tensor,  # [terms, columns]
    of_a: torch.Tensor,  # [terms, rows] int8 exponents
    of_b: torch.Tensor,  # [terms, columns] int8 exponents
    accumulator: torch.Tensor,  # [columns, rows], the order in which torch is fastest here
) -> torch.Tensor:
    """The accumulator after one instruction, [columns, rows]."""
    largest = torch.full_like(accumulator, 2 * _OF_ZERO, dtype=torch.int8)
    exponent = torch.empty_like(largest)
    for row, column in zip(of_a, of_b[..., None], strict=True):
        torch.maximum(largest, torch.add(column, row, out=exponent), out=largest)
    of_accumulator = (torch.frexp(accumulator).exponent - 1).masked_fill(accumulator == 0, 2 * _OF_ZERO)
    shift = (KEPT_BITS - torch.maximum(of_accumulator, largest.int())).clamp_max(120)
    unit, inverse = _power_of_two(shift), _power_of_two(-shift)
    total = (accumulator * unit).trunc_()
    addend = torch.empty_like(total)
    for row, column in zip(a, b[..., None], strict=True):
        total += torch.mul(column, row, out=addend).mul_(unit).trunc_()
    return _cut(total.mul_(inverse))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2 to the power of each int32, in float32."""
    return ((exponent + 127) << 23).view(torch.float32)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 with 13 bits after the leading one; the others are cut off."""
    return (tensor.view(torch.int32) & -(1 << _DROPPED_BITS)).view(torch.float32)
