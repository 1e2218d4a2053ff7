"""Truth and the same-precision reference, with which an output is compared.

Truth is attention in float64, on the same inputs as the candidate, which are already rounded to its dtype.

The same-precision reference emulates an ideal kernel of the candidate's precision.  It is the same computation in
float64, but rounds to the dtype where such a kernel must round: P before the product with V, and the output.  Its
difference from truth is the error that the dtype alone causes on these data; tolerances are multiples of it.

A float32 kernel has no such place: its error comes from all its sums.  `float32_error` computes the size of that error,
and the reference only shows an example: it rounds S, P and the output to float32, or, with the declared rounding
`tf32`, the inputs of both matrix products to tf32.

Neither uses torch's SDPA, whose precision changed between releases.  Both process the queries in blocks, so that the
scores of long sequences fit into memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pytest_fa.catalog.variant import Rounding
from pytest_fa.earlier import TRUTH_ATTRIBUTES, with_old_attributes
from pytest_fa.judge.float32_error import Float32Error, output_error, score_variance, to_tf32
from pytest_fa.run.inputs import Inputs

BLOCK_BYTES = {"cuda": 2**30, "cpu": 2**27}  # of float64 scores per block of queries


class Spread(NamedTuple):
    """The size of the error that rounding P causes in each output element; the policy `fp8` scales its bounds by it."""

    of_sum: torch.Tensor  # [batch, heads, seq_q, head_dim] float64, sqrt(sum p^2 v^2) over keys, p normalised
    largest_v: torch.Tensor  # [batch, heads, 1, 1] float64, max|v| of the head


@with_old_attributes(TRUTH_ATTRIBUTES)
class Truth(NamedTuple):
    """What an output is compared with.  `spread` is None unless it was requested."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim] float64, exact
    same_precision: torch.Tensor  # [batch, heads, seq_q, head_dim] float64, rounded where an ideal kernel rounds
    terms: int  # number of terms in the sum of an output element: seq_k for attention, head_dim for scores
    # The RMS that a row would have if V (for scores: K) were random: sqrt(sum p^2) rms(v).
    row_size: torch.Tensor  # [batch, heads, seq_q] float64
    spread: Spread | None = None
    float32_error: Float32Error | None = None  # for fp32 only


def make_truth(inputs: Inputs, rounds: tuple[Rounding, ...] = (), *, with_spread: bool = False) -> Truth:
    """Compute truth and the same-precision reference of attention.

    The reference rounds P = exp(S - max) to the dtype, multiplies it by V, divides by the row sum and rounds the
    result.  `rounds` adds the roundings that a manifest declares: `q` rounds Q * scale, `s` rounds S, and `p` divides P
    by its row sum before P is rounded.  Rows that see no key are zero.  `with_spread` also computes `Truth.spread`,
    which takes a third matrix product and is read by the policy `fp8` only.  For fp32, the reference is that of
    `_with_float32_error`, and `tf32` is the only rounding in `rounds` that changes it.
    """
    q, k, v = inputs.q.double(), _per_head(inputs.k, inputs.q), _per_head(inputs.v, inputs.q)  # [b, h, s, d] float64
    dtype = inputs.q.dtype
    rows = _rows_per_block(inputs)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    same_precision = torch.empty_like(out)
    row_size = torch.empty_like(out[..., 0])
    rms_v = _rms(v)
    of_sum = torch.empty_like(out) if with_spread else None
    for start in range(0, q.shape[2], rows):
        block = slice(start, min(start + rows, q.shape[2]))
        hidden = _hidden(inputs, block)  # [rows, seq_k] or None
        scores = (q[:, :, block] * inputs.scale) @ k.transpose(2, 3)  # [b, h, rows, seq_k]
        p, row_sum = _softmax_parts(scores, hidden)
        out[:, :, block] = _divide(p @ v, row_sum)
        row_size[:, :, block] = rms_v * _divide(p.square().sum(-1, keepdim=True).sqrt(), row_sum)[..., 0]
        if of_sum is not None:
            of_sum[:, :, block] = _divide((p.square() @ v.square()).sqrt(), row_sum)
        if "q" in rounds:
            scores = _round(q[:, :, block] * inputs.scale, dtype) @ k.transpose(2, 3)
        if "s" in rounds:
            scores = _round(scores, dtype)
        if "q" in rounds or "s" in rounds:
            p, row_sum = _softmax_parts(scores, hidden)
        divided_first = "p" in rounds
        ideal = _round(_divide(p, row_sum), dtype) @ v if divided_first else _divide(_round(p, dtype) @ v, row_sum)
        same_precision[:, :, block] = _round(ideal, dtype)
    spread = None if of_sum is None else Spread(of_sum, _largest(v))
    truth = Truth(out, same_precision, inputs.k.shape[2], row_size, spread)
    return _with_float32_error(truth, inputs, tf32="tf32" in rounds) if dtype == torch.float32 else truth


def _with_float32_error(truth: Truth, inputs: Inputs, *, tf32: bool) -> Truth:
    """Add the size of the error of float32 arithmetic, and replace the same-precision reference by an example of it.

    The example rounds S, P and the output to float32, or, with `tf32`, Q, K, P and V to tf32 and the output to float32.
    """
    rounded = to_tf32 if tf32 else lambda tensor: _round(tensor, torch.float32)
    q, k, v = inputs.q.double(), _per_head(inputs.k, inputs.q), _per_head(inputs.v, inputs.q)  # [b, h, s, d] float64
    rows = _rows_per_block(inputs)
    same_precision, deviation, bias = (torch.empty_like(truth.out) for _ in range(3))
    for start in range(0, q.shape[2], rows):
        block = slice(start, min(start + rows, q.shape[2]))
        hidden = _hidden(inputs, block)  # [rows, seq_k] or None
        scores = (q[:, :, block] * inputs.scale) @ k.transpose(2, 3)  # [b, h, rows, seq_k]
        p, _ = _softmax_parts(scores, hidden)
        variance = score_variance(q[:, :, block], k, inputs.scale, tf32=tf32)
        deviation[:, :, block], bias[:, :, block] = output_error(scores, variance, p, v, tf32=tf32)
        scores = _round(rounded(q[:, :, block]) @ rounded(k).transpose(2, 3) * inputs.scale, torch.float32)
        p, row_sum = _softmax_parts(scores, hidden)
        same_precision[:, :, block] = _round(_divide(rounded(p) @ rounded(v), row_sum), torch.float32)
    return truth._replace(same_precision=same_precision, float32_error=Float32Error(deviation, bias))


def _per_head(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """K or V in float64, each of its heads repeated for the query heads that share it."""
    return tensor.double().repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _rms(v: torch.Tensor) -> torch.Tensor:
    """The RMS of each head of V, [batch, heads, 1]; 0 if there are no keys."""
    return (v.square().sum((-1, -2)) / max(1, v.shape[-1] * v.shape[-2])).sqrt()[..., None]


def _largest(v: torch.Tensor) -> torch.Tensor:
    """max|v| of each head, [batch, heads, 1, 1]; 0 if there are no keys."""
    return v.abs().amax((-1, -2), keepdim=True) if v.shape[2] else v.new_zeros((*v.shape[:2], 1, 1))


def _rows_per_block(inputs: Inputs) -> int:
    """The number of queries per block, so that the float64 scores of a block fit into `BLOCK_BYTES`."""
    batch, heads, seq_q, _ = inputs.q.shape
    bytes_per_row = 8 * batch * heads * max(1, inputs.k.shape[2])
    return max(1, min(seq_q, BLOCK_BYTES[inputs.q.device.type] // bytes_per_row))


def _hidden(inputs: Inputs, block: slice) -> torch.Tensor | None:
    """The mask of a block of queries, [rows, seq_k]: True where a key is hidden; None without a mask."""
    if inputs.causal == "none":
        return None
    seq_q, seq_k, device = inputs.q.shape[2], inputs.k.shape[2], inputs.q.device
    shift = 0 if inputs.causal == "top_left" else seq_k - seq_q
    last_visible = torch.arange(block.start, block.stop, device=device)[:, None] + shift  # [rows, 1]
    return torch.arange(seq_k, device=device)[None, :] > last_visible


def _softmax_parts(scores: torch.Tensor, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """P = exp(S - max) and its row sums; both are zero in a row that sees no key."""
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1, keepdim=True)
    row_max = scores.amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
    p = torch.exp(scores - row_max)
    return p, p.sum(-1, keepdim=True)


def _divide(numerator: torch.Tensor, row_sum: torch.Tensor) -> torch.Tensor:
    """The quotient, and zero in a row whose sum is zero because it sees no key."""
    return torch.where(row_sum > 0, numerator / row_sum, torch.zeros_like(numerator))


def _round(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values rounded to `dtype`, as float64."""
    return tensor.to(dtype).double()
