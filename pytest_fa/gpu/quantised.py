"""Quantised tensors: e4m3 numbers with one float32 factor, the descale, for each head.

A head is divided by its descale, max|x| / 448, and rounded to e4m3, so that its largest element becomes 448, the
largest e4m3 number.  A kernel computes with the products of e4m3 numbers and descales.  A head of zeros has the
descale 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fa.attention.e4m3 import Data

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
OUTLIER = 64.0  # the outlier, where the other elements are from N(0, 1)
HEAD_STEP = 1.5  # between the magnitudes of adjacent heads, so that no head is right with another's descale
SMALL = 2.0**-14  # a descale of Q that is rounded to fp16 loses most of its bits
SMALL_V = 2.0**-6  # the output stays in the normal range of fp16


class Descales(NamedTuple):
    """The factor of each head, float32 and contiguous: q [batch, heads], k and v [batch, kv_heads]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Descales:
        """The same function of each of the three, contiguous."""
        return Descales(*(function(tensor).contiguous() for tensor in self))


def descales_of(*tensors: torch.Tensor | None) -> Descales | None:
    """The descales of q, k and v; None if one of them is missing."""
    present = [tensor for tensor in tensors if tensor is not None]
    return Descales(*present) if len(present) == len(Descales._fields) else None


def quantise(
    values: torch.Tensor,  # [batch, heads, seq, head_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 numbers of a tensor, with its strides, and its descales, [batch, heads] float32.  NaN stays NaN.

    Numbers are clamped to 448 before they are rounded: what a conversion does with larger ones depends on the library.
    Quantised numbers, quantised again, stay the same bit by bit, unless the largest is subnormal in float32 or not
    finite.  The largest number is therefore divided by a tensor: on a GPU, torch multiplies by the reciprocal of a
    Python number, and the descale could change with every time.
    """
    largest = values.abs().amax((2, 3)).float() if values.shape[2] else values.new_zeros(values.shape[:2]).float()
    descale = (largest / torch.full_like(largest, E4M3_MAX)).contiguous()
    divisor = descale.where(descale > 0, 1.0)[..., None, None]
    return (values / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), descale


def dequantised(numbers: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """The exact values of e4m3 numbers with these descales, [batch, heads, seq, head_dim] float64."""
    return numbers.double() * descale.double()[..., None, None]


def with_special_heads(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    data: Data,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same data, with heads of different magnitudes and what a case has in some of its heads.

    Each head of K is divided by a factor by which its heads of Q are multiplied, so that the scores do not change.

    zero_head   the first head of Q and of K, and the last head of V, are zero
    outlier     in the middle of the sequence, one element is 64: in the first head of Q and K, and the last head of V
    tiny        Q is 2^-14 and V 2^-6 times as large, K 2^14 times, so that the scores do not change
    """
    factor = _head_factors(k)
    q, k, v = q * factor.repeat_interleave(q.shape[1] // k.shape[1], dim=1), k / factor, v * factor
    if data == "zero_head":
        q[:, 0], k[:, 0], v[:, -1] = 0, 0, 0
    elif data == "outlier":
        for tensor, head in ((q, 0), (k, 0), (v, -1)):
            tensor[:, head, tensor.shape[2] // 2 : tensor.shape[2] // 2 + 1, 0] = OUTLIER
    elif data == "tiny":
        q, k, v = q * SMALL, k / SMALL, v * SMALL_V
    return q, k, v


def _head_factors(k: torch.Tensor) -> torch.Tensor:
    """1 to 1.5^3, another for adjacent batches and heads, [batch, kv_heads, 1, 1]."""
    batches, heads = (torch.arange(size, device=k.device) for size in k.shape[:2])
    return (HEAD_STEP ** ((batches[:, None] + heads) % 4))[..., None, None]


def fill_random(buffer: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fill a buffer with numbers from N(0, 1), in e4m3 from N(0, 100^2), in int8 from N(0, 40^2), and return it."""
    numbers = torch.randn(buffer.shape, generator=generator, device=buffer.device)
    if buffer.dtype == E4M3:
        numbers = (100 * numbers).clamp(-E4M3_MAX, E4M3_MAX)
    if buffer.dtype == torch.int8:
        numbers = (40 * numbers).clamp(-127, 127)
    return buffer.copy_(numbers)
