"""The log-sum-exp of each row, which a kernel may write or return beside its output.

LSE = log(sum over keys of exp(score)), in natural logarithms; -inf for a row that sees no key.  The sum also has the
scores that have no value, such as a sink: a row that sees no key then has the sink as its LSE.  Its error is absolute:
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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fa.attention.mistake import LOWEST, last_tiles
from pytest_fa.attention.part import Convention, Part
from pytest_fa.attention.rows import RowTruth, ScoreBlock

if TYPE_CHECKING:
    import torch

UNIT = 2.0**-24  # half the distance between 1 and the next float32
E4M3_SUM_UNIT = 2.0**-12  # twice the distance between 1 and the next number that a sum of e4m3 products can be
DEVIATIONS = 8.0  # standard deviations of a row's rounding error that are allowed
LARGEST_EXPONENT = 88.72  # exp of a larger number overflows float32
_TINY = 1e-300
# Of [batch, heads, seq_q]: each order is its own inverse.
ORDERS = {"bhs": (0, 1, 2), "bsh": (0, 2, 1), "hbs": (1, 0, 2)}


class Figures(NamedTuple):
    """Figures of some rows, [batch, heads, rows] float64 each."""

    exact: torch.Tensor
    reference: torch.Tensor  # the log-sum-exp of the same-precision reference
    weight: torch.Tensor  # sqrt(sum p^2)
    size: torch.Tensor  # A: the weighted size of the terms of the scores
    keys: torch.Tensor  # that the row sees
    e4m3_sums: torch.Tensor  # sqrt(D) B under the policy `fp8`, else 0


class LogSumExp(Part):
    """[batch, heads, seq_q] float32, contiguous."""

    name = "lse"
    summary = "the log-sum-exp of each row, beside the output"
    output = "lse"
    output_names = {"lse": ("lse", "softmax_lse", "logsumexp")}
    output_title = "log-sum-exp"
    conventions = {
        "lse": Convention(
            {"natural": "the log-sum-exp is a natural logarithm", "base2": "the log-sum-exp is in base 2"}
        ),
        "lse_empty": Convention(
            {value: f"the log-sum-exp of rows without keys is {value}" for value in ("-inf", "+inf", "0")}
        ),
        "lse_order": Convention(
            {
                "bhs": "the log-sum-exp is [batch, heads, queries]",
                "bsh": "the log-sum-exp is [batch, queries, heads]",
                "hbs": "the log-sum-exp is [heads, batch, queries]",
            }
        ),
        "lse_has_sink": Convention(
            {"true": "the sink is part of the log-sum-exp", "false": "the sink is left out of the log-sum-exp"},
            is_seen_in=("sink",),
        ),
    }
    faults = {
        "lse_log2": ("lse", False),
        "lse_unscaled": ("lse", False),
        "lse_without_max": ("lse", False),
        "lse_one_late": ("new_data", False),
        "lse_last_tile": ("lse", False),
        "lse_of_a_range": ("split_and_merge", True),
        "lse_log2_when_long": ("lse", True),
        "lse_without_nan": ("contained_nan", True),
        "lse_skips_nan": ("contained_nan", True),
    }
    twins = ("twin_right_lse", "twin_right_lse_returned")

    # -- conventions ------------------------------------------------------------------------------------------------

    def convention_problem(self, key: str, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """Only a variant that returns it, or a backward pass, which gets it, has a convention for it."""
        if "lse" in variant.returns or (variant.computes == "gradients" and not variant.entry.autograd):
            return None
        return f"returns is [{', '.join(variant.returns)}]; write `returns: [out, lse]`, or drop {key}"

    def row_axes(self, conventions: Mapping[str, str]) -> tuple[int, int, int]:
        """The order of the axes."""
        return ORDERS[conventions.get("lse_order", "bhs")]

    def rows_given(self, rows: torch.Tensor, conventions: Mapping[str, str]) -> torch.Tensor:
        """Natural logarithms, and -inf in rows without keys, as a kernel with these conventions has them."""
        if conventions.get("lse") == "base2":
            rows = rows / math.log(2)
        empty = conventions.get("lse_empty")
        return rows if empty is None else rows.masked_fill(rows == -math.inf, float(empty))

    def rows_meant(self, rows: torch.Tensor, exact: torch.Tensor, conventions: Mapping[str, str]) -> torch.Tensor:
        """Natural logarithms, and -inf in rows without keys."""
        rows = rows.double()
        if conventions.get("lse") == "base2":
            rows = rows * math.log(2)
        empty = conventions.get("lse_empty")
        if empty == "+inf":
            return rows.where(~rows.isinf(), -rows)
        if empty == "0":  # of which another row may be right, too
            is_zero = rows == 0
            return rows.where(exact != -math.inf, rows.masked_fill(is_zero, -math.inf).masked_fill(~is_zero, 0.0))
        return rows

    # -- the manifest -----------------------------------------------------------------------------------------------

    def manifest_problem(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """What is wrong with `returns` or `entry.call` because of the log-sum-exp, or None."""
        return next(self._problems(variant), None)

    def _problems(self, variant: Any) -> Iterator[str]:  # `catalog.variant.Variant`
        if variant.computes == "gradients":  # whose calls get it
            return
        call, listed = variant.entry.call, f"[{', '.join(variant.returns)}]"
        wants_it = "lse" in variant.returns
        if wants_it and variant.computes == "scores":
            yield f"returns is {listed}, but computes is 'scores', which have no log-sum-exp; write [out]"
        if call is None:
            return
        named = call.passes("lse"), call.place_of("lse") is not None
        if wants_it and not any(named):
            yield (
                f"returns is {listed}, but entry.call names no 'lse'; add it to arguments if the function writes it, "
                f"or write `returns: [out, lse]` in entry.call if the function returns it"
            )
        if not wants_it and any(named):
            yield f"entry.call names 'lse', but returns is {listed}; write `returns: [out, lse]` at the top level, too"
        if all(named):
            yield "entry.call passes 'lse' and names it in returns; use only one of the two"

    # -- the judge --------------------------------------------------------------------------------------------------

    def row_figures(self, block: ScoreBlock) -> Figures:
        """The figures of a block of queries."""
        block = _with_its_sinks(block)
        scaled, k, rounds = block.q * block.scale, block.k, block.rounds
        products = scaled @ k.transpose(2, 3)
        scores = block.seen(products)  # [b, h, rows, seq_k]
        exact = exact_lse(scores, block.sinks)
        p = (scores - finite(exact)[..., None]).exp()
        size = (p * (scaled.abs() @ k.abs().transpose(2, 3))).sum(-1)
        stored = _rounded(scaled, block.dtype) @ k.transpose(2, 3) if "q" in rounds else products
        stored = (block.stored or block.seen)(_rounded(stored, block.dtype) if "s" in rounds else stored)
        row_max = finite(_largest(stored, block.sinks) if stored.shape[-1] else exact)
        row_sum = _rounded((stored - row_max[..., None]).exp(), block.dtype).sum(-1)
        if block.sinks is not None:
            row_sum = row_sum + (block.sinks - row_max[..., None]).exp().sum(-1)
        reference = row_max + row_sum.log()
        is_fp8 = block.policy == "fp8"
        e4m3_sums = _error_of_e4m3_sums(scaled, k, scores, p) if is_fp8 else exact.new_zeros(exact.shape)
        return Figures(
            exact, reference, p.square().sum(-1).sqrt(), size, (scores > -math.inf).sum(-1).double(), e4m3_sums
        )

    def row_truth(self, figures: Sequence[torch.Tensor], rounds: tuple[str, ...], policy: str) -> RowTruth:
        """The largest error that is allowed in each row; 0 where only -inf or NaN is right."""
        rows = Figures(*figures)
        has_keys = rows.exact.isfinite()
        ideal = (rows.reference - rows.exact).abs().where(has_keys, 0.0)
        relative = (ideal / rows.weight.clamp_min(_TINY)).where(has_keys, 0.0)
        rms = float((relative.square().sum() / has_keys.sum().clamp_min(1)).sqrt())
        arithmetic = UNIT * (16 * (rows.size + rows.exact.abs() + 4) + 4 * rows.keys.sqrt())
        allowed = DEVIATIONS * ideal.maximum(rms * rows.weight) + arithmetic
        if policy == "fp8":
            allowed = 0.12 * rows.weight + 2.0**-9 + E4M3_SUM_UNIT * rows.e4m3_sums + arithmetic
        if "tf32" in rounds:
            allowed = allowed + 2.0**-10 * rows.size
        return RowTruth(rows.exact, allowed.where(has_keys, 0.0))

    def row_mistakes(self, block: ScoreBlock, exact: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        """The values of each mistake in some rows, [batch, heads, rows] float64, and its sentence."""
        all_sinks, block = block.sinks, _with_its_sinks(block)
        declared = block.conventions.get("lse_has_sink")
        if all_sinks is not None:
            other = block._replace(sinks=all_sinks if declared else None)
            scores = block.seen(block.q @ block.k.transpose(2, 3) * block.scale)
            words = self.conventions["lse_has_sink"].advice("lse_has_sink", declared, "true" if declared else "false")
            yield exact_lse(scores, other.sinks), words
        base, factor = block.conventions.get("lse"), math.log(2)
        words = self.conventions["lse"].advice("lse", base, "natural" if base else "base2")
        yield (exact * factor if base else exact / factor), words
        words = f"the log-sum-exp is multiplied by {'log2 e' if base else 'ln 2'} once too often"
        yield (exact / factor if base else exact * factor), words
        products = block.q @ block.k.transpose(2, 3)
        yield exact_lse(block.seen(products), block.sinks), "the scale is missing in the log-sum-exp"
        scores = block.seen(products * block.scale)
        for title, seen in block.seen_without.items():
            yield exact_lse(seen(products * block.scale), block.sinks), f"{title} is left out of the log-sum-exp"
        if block.sinks is not None:
            yield from _sink_mistakes(scores, block.sinks, exact, block.conventions)
        row_max = _largest(scores, block.sinks) if scores.shape[-1] else exact
        yield exact - row_max, "the row max is left out of the log-sum-exp: it is log(l), it must be m + log(l)"
        yield row_max, "the log-sum-exp is only the row max: log(l) is missing"
        for kept, last_tile in last_tiles(scores.shape[-1]):
            yield exact_lse(scores[..., :kept], block.sinks), f"{last_tile} is left out of the log-sum-exp"


def _with_its_sinks(block: ScoreBlock) -> ScoreBlock:
    """The block with the sinks that are part of the log-sum-exp."""
    return block._replace(sinks=None) if block.conventions.get("lse_has_sink") == "false" else block


def _sink_mistakes(
    scores: torch.Tensor, sinks: torch.Tensor, exact: torch.Tensor, conventions: Mapping[str, str]
) -> Iterator[tuple[torch.Tensor, str]]:
    """The sink counted twice, left out of the maximum, and left out where no key is seen."""
    yield exact.logaddexp(sinks.logsumexp(-1)), "the sink is counted twice in the log-sum-exp"
    of_keys = scores.amax(-1) if scores.shape[-1] else exact.new_full(exact.shape, -math.inf)
    overflow = -math.inf if conventions.get("lse_empty") == "+inf" else math.inf
    words = "the row maximum leaves out the sink: exp(sink - max) overflows in the log-sum-exp"
    for start in (LOWEST, 0.0):  # the maximum of a row that sees no key
        overflows = sinks.amax(-1) - of_keys.masked_fill(of_keys == -math.inf, start) > LARGEST_EXPONENT
        yield exact.masked_fill(overflows, overflow), words
    words = "the log-sum-exp of rows that see no key leaves out the sink: it must be the sink, not -inf"
    yield exact.masked_fill(of_keys == -math.inf, -math.inf), words


def exact_lse(scores: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """The log-sum-exp over the last axis and the sinks, [batch, heads, rows]; -inf without both."""
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    return lse if sinks is None else lse.logaddexp(sinks.logsumexp(-1).expand_as(lse))


def _largest(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The maximum of each row and its sinks, [batch, heads, rows]."""
    row_max = scores.amax(-1)
    return row_max if sinks is None else row_max.maximum(sinks.amax(-1))


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


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """The values, with 0 instead of -inf."""
    return tensor.masked_fill(tensor == -math.inf, 0.0)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).double()


PART = LogSumExp()
