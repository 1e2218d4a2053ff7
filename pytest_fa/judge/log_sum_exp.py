"""The log-sum-exp of each row: truth in float64, and how far a kernel's value may be from it.

LSE = log(sum over keys of exp(score)), in natural logarithms; -inf for a row that sees no key.  Its error is absolute:
a backward pass or a merge of partial results computes exp(score - LSE), so an error of 0.01 there is one of 1 %.

The bound of a row has two parts.

- Rounding of P.  A kernel may sum P as it is stored, rounded to the dtype.  The same-precision reference does so.  Let
  e be its error in a row, w = sqrt(sum p^2) of the row's weights, and R the RMS of e / w over all rows: allowed are
  8 max(|e|, R w).  The declared roundings `q` and `s` are part of the reference, too.
- Arithmetic in float32.  With A = sum over keys of p sum over d of |scale q_d k_d|, the size of the terms of a score:
  2^-24 (16 (A + |LSE| + 4) + 4 sqrt(keys)).  The first term is for the scores, for exp2 and log2 as the GPU
  approximates them and for the last rounding; the second is for a sum of many keys, one after the other.

The policy `fp8` allows the rounding of P to e4m3 instead, as it does for the output: 0.12 w + 2^-9.  It also allows
scores that Hopper's matrix units have added in 13 bits: 2^-12 sqrt(D) B, with B = sum over keys of p (r + s^2 / (8 r)).
Here s is the score, and r = sqrt(sum over d of (scale q_d k_d)^2) is the size of its terms.  Each term loses up to
2^-13 of the largest one, or of the sum so far.  Where terms have both signs, most of that cancels, and about sqrt(D) r
remains.  Where |s| is much larger than r, most terms have the sign of s, and what they lose adds up.  Simulated right
kernels use at most 0.6 of this part, on e4m3 cases and on the data of `hard_data`.

The declared rounding `tf32` allows scores whose factors were cut off to 10 bits: 2^-10 A.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.truth import hidden_keys, repeated_heads, rows_per_block
from pytest_fa.records.checks import Bound, LseCheck, RowIndex

UNIT = 2.0**-24  # half the distance between 1 and the next float32
E4M3_SUM_UNIT = 2.0**-12  # twice the distance between 1 and the next number that a sum of e4m3 products can be
DEVIATIONS = 8.0  # standard deviations of a row's rounding error that are allowed
_TINY = 1e-300


class LseTruth(NamedTuple):
    """The log-sum-exp of each row and the largest error that is allowed, [batch, heads, seq_q] float64."""

    exact: torch.Tensor
    allowed: torch.Tensor


class _Rows(NamedTuple):
    """Figures of some rows, [batch, heads, rows] float64 each."""

    exact: torch.Tensor
    reference: torch.Tensor  # the log-sum-exp of the same-precision reference
    weight: torch.Tensor  # sqrt(sum p^2)
    size: torch.Tensor  # A: the weighted size of the terms of the scores
    keys: torch.Tensor  # that the row sees
    e4m3_sums: torch.Tensor  # sqrt(D) B under the policy `fp8`, else 0


def make_lse_truth(inputs: Inputs, rounds: tuple[Rounding, ...] = (), policy: str = "same_precision") -> LseTruth:
    """Compute the log-sum-exp of each row and its bounds, in blocks of queries."""
    inputs = inputs.exact()
    k, block_rows, seq_q = repeated_heads(inputs.k, inputs.q), rows_per_block(inputs), inputs.q.shape[2]
    starts = range(0, seq_q, block_rows)
    parts = [_rows(inputs, k, slice(start, min(start + block_rows, seq_q)), rounds, policy) for start in starts]
    rows = _Rows(*(torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)))
    return LseTruth(rows.exact, _allowed(rows, rounds, policy))


def exact_lse(scores: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp over the last axis, [batch, heads, rows]; -inf without keys."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -math.inf)
    return torch.logsumexp(scores, -1)


def check_lse(lse: torch.Tensor, truth: LseTruth) -> tuple[Bound, LseCheck]:
    """Compare a log-sum-exp, [batch, heads, seq_q] float32, with its truth.

    A row without keys must be -inf and a row whose truth is NaN must be NaN; every other row must be finite.
    """
    got = lse.double()
    same = (got == truth.exact) | (got.isnan() & truth.exact.isnan())  # -inf is equal to -inf
    error = (got - truth.exact).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    used = (error / truth.allowed).masked_fill(error == 0, 0.0)
    bad, worst = ~(error <= truth.allowed), int(used.argmax())
    value, allowed = float(error.flatten()[worst]), float(truth.allowed.flatten()[worst])
    head, query = divmod(worst, lse.shape[2])
    place: RowIndex = (*divmod(head, lse.shape[1]), query)
    check = LseCheck(
        bad_count=int(bad.sum()),
        row_count=lse.numel(),
        worst=place,
        worst_got=_text(float(got.flatten()[worst])),
        worst_want=_text(float(truth.exact.flatten()[worst])),
    )
    return Bound("lse", value if math.isfinite(value) else None, allowed, value <= allowed), check


def _rows(inputs: Inputs, k: torch.Tensor, block: slice, rounds: tuple[Rounding, ...], policy: str) -> _Rows:
    """The figures of a block of queries; `k` is in float64, [batch, heads, seq_k, head_dim]."""
    q, dtype, hidden = inputs.q[:, :, block], inputs.output_dtype, hidden_keys(inputs, block)
    scaled = q.double() * inputs.scale
    scores = _masked(scaled @ k.transpose(2, 3), hidden)  # [b, h, rows, seq_k]
    exact = exact_lse(scores)
    p = torch.exp(scores - _finite(exact)[..., None])
    size = (p * (scaled.abs() @ k.abs().transpose(2, 3))).sum(-1)
    stored = _rounded(scaled, dtype) @ k.transpose(2, 3) if "q" in rounds else scaled @ k.transpose(2, 3)
    stored = _masked(_rounded(stored, dtype) if "s" in rounds else stored, hidden)
    row_max = _finite(stored.amax(-1) if stored.shape[-1] else exact)
    reference = row_max + _rounded(torch.exp(stored - row_max[..., None]), dtype).sum(-1).log()
    e4m3_sums = _error_of_e4m3_sums(scaled, k, scores, p) if policy == "fp8" else torch.zeros_like(exact)
    return _Rows(exact, reference, p.square().sum(-1).sqrt(), size, (scores > -math.inf).sum(-1).double(), e4m3_sums)


def _error_of_e4m3_sums(
    scaled: torch.Tensor,  # [batch, heads, rows, head_dim], Q times the scale
    k: torch.Tensor,  # [batch, heads, seq_k, head_dim]
    scores: torch.Tensor,  # [batch, heads, rows, seq_k]
    p: torch.Tensor,  # [batch, heads, rows, seq_k]
) -> torch.Tensor:
    """sqrt(D) B of each row, [batch, heads, rows]."""
    terms = (scaled.square() @ k.square().transpose(2, 3)).sqrt()
    squared = scores.masked_fill(p == 0, 0.0).square()
    return math.sqrt(k.shape[3]) * (p * (terms + squared / (8 * terms.clamp_min(_TINY)))).sum(-1)


def _allowed(rows: _Rows, rounds: tuple[Rounding, ...], policy: str) -> torch.Tensor:
    """The largest error that is allowed in each row; 0 where only -inf or NaN is right."""
    has_keys = rows.exact.isfinite()
    ideal = (rows.reference - rows.exact).abs().where(has_keys, 0.0)
    relative = (ideal / rows.weight.clamp_min(_TINY)).where(has_keys, 0.0)
    rms = float((relative.square().sum() / has_keys.sum().clamp_min(1)).sqrt())
    arithmetic = UNIT * (16 * (rows.size + rows.exact.abs() + 4) + 4 * rows.keys.sqrt())
    allowed = DEVIATIONS * torch.maximum(ideal, rms * rows.weight) + arithmetic
    if policy == "fp8":
        allowed = 0.12 * rows.weight + 2.0**-9 + E4M3_SUM_UNIT * rows.e4m3_sums + arithmetic
    if "tf32" in rounds:
        allowed = allowed + 2.0**-10 * rows.size
    return allowed.where(has_keys, 0.0)


def _masked(scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """The values, with 0 instead of -inf."""
    return tensor.masked_fill(tensor == -math.inf, 0.0)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).double()


def _text(value: float) -> str:
    """A value for a record, which has no NaN and no infinity as numbers."""
    return f"{value:.6g}"
