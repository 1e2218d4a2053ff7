"""The error that float32 arithmetic causes in attention on given data: its standard deviation in each output element.

A kernel for fp16 rounds P once, and that rounding dominates its error.  A float32 kernel has no such rounding.  Its
error is the sum of thousands of small ones, and another order of summation gives another error of the same size.  One
emulated kernel would be one random sample; where few rows or keys matter, that sample may be tiny by chance.  So the
roundings of the plainest kernel, which adds one product after the other, are propagated to the output:

- One rounding changes a value x by up to 2^-24 |x|, which is taken as the standard deviation of its error.
- A sum rounds after each term, so its variance is the sum of the squares of its partial sums.  They are sampled at
  eight points, in the order of the terms.  Kernels that add in tiles round less.
- A score has the error of its sum, and errors in proportion to |S| and |max|: scale, subtraction, conversion to base 2.
- P = exp(S - max) turns an error of the score into a relative one.  A fast exp adds up to 2^-22.
- With a weight w and a relative error r of P, the output changes by w r (v - out).

If the manifest declares `tf32`, Q, K, P and V are also rounded to 10 bits after the leading one.  That rounding has a
standard deviation of 2^-12.  A kernel that cuts off the other bits, as mma does with float32 registers, makes all
values smaller by up to 2^-11 on average.  The error that results is not random: it is the bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

UNIT = 2.0**-24  # the largest relative error of one rounding to float32
FAST_EXP = 2.0**-22  # the largest relative error of ex2.approx, after the PTX ISA
TF32_UNIT = 2.0**-12  # the standard deviation of the relative error of rounding to tf32
TF32_SHRINK = 2.0**-11  # how much smaller a value is, at most, on average if the bits that tf32 lacks are cut off
TF32_LOST_BITS = 13
MIN_TERM = UNIT / 4  # of a row's largest term; smaller terms change its sum by at most themselves
POINTS = 8  # at which partial sums are sampled
SMALLEST = 2.0**-126  # the smallest normal float32; a kernel may flush smaller values to zero


class Float32Error(NamedTuple):
    """The error that float32 arithmetic, with or without tf32, causes in each output element."""

    deviation: torch.Tensor  # [batch, heads, rows, head_dim] float64, the standard deviation of its random part
    bias: torch.Tensor  # [batch, heads, rows, head_dim] float64, the largest systematic part; 0 without tf32


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The values rounded to nearest with 10 significand bits after the leading one, ties away from zero, as float64.

    This is the rounding of cvt.rna.tf32.f32.
    """
    half = 1 << (TF32_LOST_BITS - 1)
    bits = tensor.float().view(torch.int32) + half
    return (bits >> TF32_LOST_BITS << TF32_LOST_BITS).view(torch.float32).double()


def score_variance(
    q: torch.Tensor,  # [batch, heads, rows, head_dim] float64
    k: torch.Tensor,  # [batch, heads, seq_k, head_dim] float64
    scale: float,
    *,
    tf32: bool,
) -> torch.Tensor:
    """The variance of the error of each score scale * Q K^T, [batch, heads, rows, seq_k]."""
    partial = q.new_zeros((*q.shape[:3], k.shape[2]))
    variance = torch.zeros_like(partial)
    for dims in _parts(q.shape[3]):
        partial += q[..., dims] @ k[..., dims].transpose(2, 3)
        variance += UNIT**2 * (dims.stop - dims.start) * partial.square()
    variance += 2 * UNIT**2 * partial.square()  # the scale and the product with it
    if tf32:
        variance += 2 * TF32_UNIT**2 * q.square() @ k.square().transpose(2, 3)
    return variance * scale**2


def output_error(
    scores: torch.Tensor,  # [batch, heads, rows, seq_k] float64
    variance: torch.Tensor,  # [batch, heads, rows, seq_k] float64, of the scores' errors
    p: torch.Tensor,  # [batch, heads, rows, seq_k] float64, exp(S - max), zero where a key is hidden
    divisor: torch.Tensor,  # [batch, heads, rows, 1] float64, the row sum of P
    v: torch.Tensor,  # [batch, heads, seq_k, head_dim] float64
    slope: torch.Tensor | None,  # [batch, heads, rows, head_dim] float64, d out / d ln S; None without tf32
    added: torch.Tensor | None = None,  # [batch, heads, rows, seq_k] float64, the scores with a bias; None without one
) -> Float32Error:
    """The error of each output element; 0 without keys.

    In the result of a mistake, `divisor` may be another number than the row sum, and P may be negative.  The divisor
    then has the relative error of the sum of |P|.
    """
    size = p.abs()
    least_term = MIN_TERM * size.amax(-1, keepdim=True) if p.shape[3] else 0.0
    o, size_sum = p.new_zeros((*p.shape[:3], v.shape[3])), p.new_zeros((*p.shape[:3], 1))
    o_variance, sum_variance = torch.zeros_like(o), torch.zeros_like(size_sum)
    for keys in _parts(v.shape[2]):
        terms = (size[..., keys] > least_term).sum(-1, keepdim=True)
        o += p[..., keys] @ v[:, :, keys]
        size_sum += size[..., keys].sum(-1, keepdim=True)
        o_variance += 2 * UNIT**2 * terms * o.square()  # the product with the rescale factor is rounded, too
        sum_variance += 2 * UNIT**2 * terms * size_sum.square()
    total = SMALLEST**2 * (divisor > 0).double()  # [b, h, rows, 1]; float32 has no such number
    divisor, size_sum = divisor.where(divisor > 0, 1.0), size_sum.where(size_sum > 0, 1.0)
    out = o / divisor
    of_p = variance + _exp_variance(scores, p)  # [b, h, rows, seq_k], relative
    if added is not None:
        of_p = of_p.maximum(variance + _exp_variance(added, p))
    of_sum = ((size / size_sum).square() * of_p).sum(-1, keepdim=True) + sum_variance / size_sum.square()
    total = total + ((p / divisor).square() * of_p) @ v.square() + o_variance / divisor.square()
    total += (of_sum + 4 * UNIT**2) * out.square()
    if slope is None:
        return Float32Error(total.sqrt(), torch.zeros_like(total))
    total += 2 * TF32_UNIT**2 * ((p / divisor).square() @ v.square())
    return Float32Error(total.sqrt(), 2 * TF32_SHRINK * (out.abs() + slope.abs()))


def _exp_variance(scores: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The variance of P's relative error for an exact score, [batch, heads, rows, seq_k]."""
    if scores.shape[3] == 0:
        return scores
    row_max = scores.masked_fill(p == 0, -math.inf).amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    # A sink may be larger than all scores: the largest P is then below 1.
    row_max = row_max - p.amax(-1, keepdim=True).clamp(SMALLEST, 1.0).log()
    return 3 * UNIT**2 * (scores.square() + row_max.square()) + 2 * FAST_EXP**2


def _parts(length: int) -> Iterator[slice]:
    """Divide a sum of `length` terms into at most `POINTS` consecutive parts."""
    step = max(1, math.ceil(length / POINTS))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
