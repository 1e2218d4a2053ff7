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

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.grouped_heads import repeated
from pytest_fa.attention.mistake import Positions
from pytest_fa.attention.rows import Padding, RowTruth
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.gpu.quantised import E4M3
from pytest_fa.judge.float32_error import Float32Error, output_error, score_variance, to_tf32

STEP = 1e-7  # relative change of the scores for which the slope of the output is computed
ONE_TILE = 16  # keys, which one mma of P V takes: a row that sees no later ones has its maximum from the start
E4M3_P_SCALE = 2.0**8  # the largest power of two that keeps P <= 1 below 448, the largest e4m3 number
BLOCK_BYTES = {"cuda": 2**30, "cpu": 2**27}  # of float64 scores per block of queries


class Spread(NamedTuple):
    """The size of the error that rounding P causes, in units of the relative error of each p.

    The errors of different keys are independent, so their squares add up.  The policy `fp8` scales its bounds by it.
    """

    of_sum: torch.Tensor  # [batch, heads, seq_q, head_dim_v] float64, sqrt(sum p^2 v^2) over keys, p normalised
    # The same in the direction of the output's row, squared: sum p^2 <v, out>^2 over keys.
    along_row: torch.Tensor  # [batch, heads, seq_q] float64
    largest_v: torch.Tensor  # [batch, heads, 1, 1] float64, max|v| of the head


class Truth(NamedTuple):
    """What an output is compared with.  `spread` is None unless it was requested."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim_v] float64, exact
    same_precision: torch.Tensor  # [batch, heads, seq_q, head_dim_v] float64, rounded where an ideal kernel rounds
    terms: int  # number of terms in the sum of an output element: seq_k for attention, head_dim for scores
    # The RMS that a row would have if V (for scores: K) were random: sqrt(sum p^2) rms(v).
    row_size: torch.Tensor  # [batch, heads, seq_q] float64
    spread: Spread | None = None
    float32_error: Float32Error | None = None  # for fp32 only
    # `row_size` with the 4-norm of p for its 2-norm, (sum p^4)^(1/4) rms(v): as large if one key outweighs all others,
    # and smaller the more keys share the weight.  0 in rows that see none after the first `ONE_TILE` keys and have no
    # sink.  None if there is no P.
    norm4_size: torch.Tensor | None = None  # [batch, heads, seq_q] float64
    padding: Padding | None = None  # the rows that are not judged
    row_factor: float = 5.0  # how many times its expected error a row may have
    # Of gradients, the RMS of a row's error because float32 sums cancel, and because a kernel loses numbers that are
    # too small for the dtype.  The latter counts in the bound of a row alone: it matters in rows of small numbers.
    row_noise: torch.Tensor | None = None  # [batch, heads, seq_q] float64
    row_lost: torch.Tensor | None = None  # [batch, heads, seq_q] float64
    # Only if it comes from the user's functions: the truth of further outputs, what stands behind a verdict, and the
    # largest error that is allowed, if the options have one.
    rows: tuple[tuple[str, RowTruth], ...] = ()
    against: str = ""
    max_error: float | None = None


class Operands(NamedTuple):
    """What the queries of a block share."""

    k: torch.Tensor  # [batch, heads, seq_k, head_dim] float64
    v: torch.Tensor  # [batch, heads, seq_k, head_dim_v] float64
    scale: float
    rms_v: torch.Tensor  # [batch, heads, 1] float64
    largest_v: torch.Tensor | None  # [batch, heads, 1, 1] float64; None if no spread is wanted

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, scale: float, *, with_spread: bool) -> Operands:
        """The operands for K and V of each query head."""
        return cls(k, v, scale, _rms(v), _largest(v) if with_spread else None)


class Precision(NamedTuple):
    """Where an ideal kernel rounds: the output to `dtype`, P to `p_dtype`, and more where the manifest declares it."""

    dtype: torch.dtype
    rounds: tuple[Rounding, ...] = ()
    p_dtype: torch.dtype | None = None  # None: as the output

    @classmethod
    def of(cls, inputs: Inputs, rounds: tuple[Rounding, ...], *, p_in_e4m3: bool) -> Precision:
        """The precision of a kernel on these inputs."""
        return cls(inputs.output_dtype, rounds, E4M3 if p_in_e4m3 else None)

    def round_p(self, p: torch.Tensor) -> torch.Tensor:
        """P <= 1 as the second matrix product reads it; for e4m3, times 2^8, so that small P stay normal numbers."""
        if self.p_dtype != E4M3:
            return rounded_to(p, self.p_dtype or self.dtype)
        return rounded_to(p * E4M3_P_SCALE, E4M3) / E4M3_P_SCALE


# scores [b, h, rows, seq_k] -> P before the division [b, h, rows, seq_k], divisor [b, h, rows, 1]
Softmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def make_truth(inputs: Inputs, rounds: tuple[Rounding, ...] = (), *, with_spread: bool = False) -> Truth:
    """Compute truth and the same-precision reference of attention; see `truth_of_rows`.

    Rows that see no key are zero.  `with_spread` also computes `Truth.spread`, which takes two more matrix products
    and is read by the policy `fp8` only; the same-precision reference then rounds P to e4m3.
    """
    precision = Precision.of(inputs, rounds, p_in_e4m3=with_spread)
    inputs = inputs.exact().meant()
    rounded_parts = inputs._replace(rounds=rounds)
    k, v = repeated_heads(inputs.k, inputs.q), repeated_heads(inputs.v, inputs.q)
    operands = Operands.of(k, v, inputs.scale, with_spread=with_spread)
    whole, rows = _empty_truth(inputs.q, operands), rows_per_block(inputs)
    for start in range(0, inputs.q.shape[2], rows):
        block = slice(start, min(start + rows, inputs.q.shape[2]))
        softmax, change = _softmax_of(inputs, block), added_by(inputs, block_positions(inputs, block))
        stored = _softmax_of(rounded_parts, block)
        part = truth_of_rows(inputs.q[:, :, block], operands, softmax, precision, change=change, stored=stored)
        for target, source in zip(_rows_of(whole), _rows_of(part), strict=True):
            target[:, :, block] = source
    return whole._replace(padding=parts.padding(inputs))


def truth_of_rows(
    q: torch.Tensor,  # [batch, heads, rows, head_dim]
    operands: Operands,
    softmax: Softmax,
    precision: Precision,
    scores: torch.Tensor | None = None,  # [batch, heads, rows, seq_k] float64, if they are known
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,  # what adds a bias to the scores, if there is one
    stored: Softmax | None = None,  # `softmax` with the roundings of `precision`; None: it has none
    *,
    with_sizes: bool = True,  # False: the sizes of rows, which take a quarter of the time, are NaN
) -> Truth:
    """The truth of some queries, for any `softmax`: the right one, or that of a mistake.

    The same-precision reference rounds P = exp(S - max) to the dtype, multiplies it by V, divides by the row sum and
    rounds the result.  `Precision.rounds` adds the roundings that a manifest declares: `q` rounds Q * scale, `s` rounds
    S, `tanh` what the tanh of a soft cap gets and gives, and `p` divides P by its row sum before P is rounded.  For
    fp32, the reference rounds S, P and the output to float32, or, with `tf32`, Q, K, P and V to tf32 and the output to
    float32; no other rounding changes it.
    """
    k, v, scale, rms_v, largest_v = operands
    if scores is None:
        scores = scaled_scores(q, operands)
    p, row_sum = softmax(scores)
    out = _divide(p @ v, row_sum)
    norms = _norms(p, row_sum) if with_sizes else (torch.full_like(row_sum[..., 0], math.nan),) * 2
    row_size, norm4_size = (rms_v * size for size in norms)
    spread = None
    if largest_v is not None:
        of_sum = _divide((p.square() @ v.square()).sqrt(), row_sum)
        along_row = _divide(p * (out @ v.transpose(2, 3)), row_sum).square().sum(-1)
        spread = Spread(of_sum, along_row, largest_v)
    if precision.dtype != torch.float32:
        if rounds := {"q", "s", "tanh"} & set(precision.rounds):
            rounded = rounded_scores(q, operands, scores, precision.dtype, frozenset(rounds))
            p, row_sum = (stored or softmax)(rounded)
        same_precision = _same_precision(p, row_sum, v, precision)
        return Truth(out, same_precision, k.shape[2], row_size, spread, None, norm4_size)
    tf32 = "tf32" in precision.rounds
    variance = score_variance(q.double(), k, scale, tf32=tf32)
    slope = (_attend(softmax, scores * (1 + STEP), v) - out) / STEP if tf32 else None
    error = output_error(scores, variance, p, row_sum, v, slope, change and change(scores))
    same_float32 = _same_float32(q, operands, softmax, tf32=tf32)
    return Truth(out, same_float32, k.shape[2], row_size, spread, error, norm4_size)


def _norms(p: torch.Tensor, row_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2-norm and the 4-norm of the normalised p of each row; the latter is 0 where the largest p is surely 1."""
    powers = p.square()
    norm2 = _divide(powers.sum(-1, keepdim=True).sqrt(), row_sum)[..., 0]
    norm4 = _divide(powers.square_().sum(-1, keepdim=True) ** 0.25, row_sum)[..., 0]
    has_sink = (row_sum > p.sum(-1, keepdim=True))[..., 0]
    is_in_one_tile = (p[..., ONE_TILE:] == 0).all(-1) & ~has_sink
    return norm2, norm4.masked_fill(is_in_one_tile, 0.0)


def _attend(softmax: Softmax, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p, row_sum = softmax(scores)
    return _divide(p @ v, row_sum)


def scaled_scores(q: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Scale * Q K^T, [batch, heads, rows, seq_k] float64."""
    return (q.double() * operands.scale) @ operands.k.transpose(2, 3)


def rounded_scores(
    q: torch.Tensor, operands: Operands, scores: torch.Tensor, dtype: torch.dtype, rounds: frozenset[str]
) -> torch.Tensor:
    """The scores of an ideal kernel that rounds Q * scale, S or both."""
    if "q" in rounds:
        scores = rounded_to(q.double() * operands.scale, dtype) @ operands.k.transpose(2, 3)
    return rounded_to(scores, dtype) if "s" in rounds else scores


def _same_precision(p: torch.Tensor, row_sum: torch.Tensor, v: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The output of an ideal kernel of another dtype than fp32."""
    is_divided = "p" in precision.rounds
    ideal = precision.round_p(_divide(p, row_sum)) @ v if is_divided else _divide(precision.round_p(p) @ v, row_sum)
    return rounded_to(ideal, precision.dtype)


def _same_float32(q: torch.Tensor, operands: Operands, softmax: Softmax, *, tf32: bool) -> torch.Tensor:
    """The output of an fp32 kernel, as an example of the size of its error."""
    rounded = to_tf32 if tf32 else lambda tensor: rounded_to(tensor, torch.float32)
    k, v, scale, _, _ = operands
    p, row_sum = softmax(rounded_to(rounded(q.double()) @ rounded(k).transpose(2, 3) * scale, torch.float32))
    return rounded_to(_divide(rounded(p) @ rounded(v), row_sum), torch.float32)


def _empty_truth(q: torch.Tensor, operands: Operands) -> Truth:
    """A truth for the output of `q` whose rows are not computed yet."""

    def empty() -> torch.Tensor:
        return torch.empty((*q.shape[:3], operands.v.shape[3]), dtype=torch.float64, device=q.device)

    error = Float32Error(empty(), empty()) if q.dtype == torch.float32 else None
    row_size = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    largest_v = operands.largest_v
    spread = None if largest_v is None else Spread(empty(), torch.empty_like(row_size), largest_v)
    return Truth(empty(), empty(), operands.k.shape[2], row_size, spread, error, torch.empty_like(row_size))


def _rows_of(truth: Truth) -> list[torch.Tensor]:
    """The tensors of a truth that have a part for each query, [batch, heads, rows, ...]."""
    of_spread = () if truth.spread is None else (truth.spread.of_sum, truth.spread.along_row)
    sizes = (truth.row_size,) if truth.norm4_size is None else (truth.row_size, truth.norm4_size)
    return [truth.out, truth.same_precision, *sizes, *of_spread, *(truth.float32_error or ())]


def repeated_heads(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """K or V in float64, each of its heads repeated for the query heads that share it."""
    return repeated(tensor.double(), q.shape[1])


def _rms(v: torch.Tensor) -> torch.Tensor:
    """The RMS of each head of V, [batch, heads, 1]; 0 if there are no keys."""
    return (v.square().sum((-1, -2)) / max(1, v.shape[-1] * v.shape[-2])).sqrt()[..., None]


def _largest(v: torch.Tensor) -> torch.Tensor:
    """max|v| of each head, [batch, heads, 1, 1]; 0 if there are no keys."""
    return v.abs().amax((-1, -2), keepdim=True) if v.shape[2] else v.new_zeros((*v.shape[:2], 1, 1))


def rows_per_block(inputs: Inputs) -> int:
    """The number of queries per block, so that the float64 scores of a block fit into `BLOCK_BYTES`."""
    batch, heads, seq_q, _ = inputs.q.shape
    bytes_per_row = 8 * batch * heads * max(1, inputs.k.shape[2])
    return max(1, min(seq_q, BLOCK_BYTES[inputs.q.device.type] // bytes_per_row))


def block_positions(inputs: Inputs, block: slice) -> Positions:
    """The positions of a block of queries and of all keys."""
    queries = torch.arange(block.start, block.stop, device=inputs.q.device)
    return parts.positions_of(inputs, queries, torch.arange(inputs.k.shape[2], device=inputs.q.device))


def hidden_keys(inputs: Inputs, block: slice) -> torch.Tensor | None:
    """The mask of a block of queries, [rows, seq_k] or with batch and heads: True where a key is hidden, or None."""
    return parts.hidden_keys(inputs, block_positions(inputs, block))


def _softmax_of(inputs: Inputs, block: slice) -> Softmax:
    """The softmax of a block of queries: of their scores, as the parts of attention change them."""
    positions = block_positions(inputs, block)
    hidden, sinks = parts.hidden_keys(inputs, positions), parts.sinks(inputs, positions)
    return lambda scores: _softmax_parts(parts.changed_scores(inputs, scores, positions), hidden, sinks)


def added_by(inputs: Inputs, positions: Positions) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The scores after all parts, if one adds to them; else None."""
    if not parts.adds_to_scores(inputs):
        return None
    return lambda scores: parts.changed_scores(inputs, scores, positions)


def _softmax_parts(
    scores: torch.Tensor, hidden: torch.Tensor | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """P = exp(S - max) and its row sums, in which sinks count; both are zero in a row without any of them."""
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1, keepdim=True)
    row_max = scores.amax(-1, keepdim=True)
    if sinks is not None:
        row_max = row_max.maximum(sinks.amax(-1, keepdim=True))
    row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
    p = torch.exp(scores - row_max)
    row_sum = p.sum(-1, keepdim=True)
    return p, row_sum if sinks is None else row_sum + torch.exp(sinks - row_max).sum(-1, keepdim=True)


def _divide(numerator: torch.Tensor, row_sum: torch.Tensor) -> torch.Tensor:
    """The quotient, and zero in a row whose sum is zero because it sees no key."""
    return (numerator / row_sum).masked_fill_(~(row_sum > 0), 0.0)


def rounded_to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values rounded to `dtype`, as float64."""
    return tensor.to(dtype).double()
