"""Explain NaN and Inf in an output: never written, rows without a key, an exp that overflows, or computed otherwise."""

from __future__ import annotations

import math

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.scores import Computes
from pytest_fa.gpu.inputs import Inputs, is_poison
from pytest_fa.judge.error_location import location_text
from pytest_fa.judge.fp16_range import fp16_overflows
from pytest_fa.judge.mistaken import all_hidden
from pytest_fa.judge.row_scores import LARGEST_WORDS, RowScores, positions_of, row_scores, rows_far_below

# Rows whose logarithm is within this range of that of the largest number may overflow or not; below it, P V may.
UNSURE = (-2.5, 0.1)
UNDERFLOW = {torch.float32: -80.0, torch.float16: -9.0}  # rows whose scores are all below it may be 0/0


def explain_nonfinite(
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim or seq_k]
    bad: torch.Tensor,  # the same shape: where the output is wrong
    inputs: Inputs,
    computes: Computes,
) -> str:
    """Why a wrong output has NaN or Inf; empty if it has none."""
    unwritten = is_poison(out)
    computed = ~out.isfinite() & ~unwritten
    causes = []
    if bool(unwritten.any()):
        causes.append(f"the kernel never wrote {location_text(unwritten, computes)}: the NaN poison is still there")
    if bool(computed.any()):
        place = location_text(computed, computes)
        looks = "look for 0/0, an overflow, or unwritten memory that it reads"
        others_are_right = not bool((bad & out.isfinite()).any())
        is_explained = bool(causes) or computes == "scores"
        reason = "" if is_explained else _reason(out, computed, inputs, others_are_right=others_are_right)
        causes.append(reason or f"the kernel computed NaN or Inf in {place}: {looks}")
    if causes and bool((bad & out.isfinite()).any()):
        causes.append("finite elements are wrong, too")
    return "; ".join(causes)


def _reason(out: torch.Tensor, computed: torch.Tensor, inputs: Inputs, *, others_are_right: bool) -> str:
    """The reason that predicts exactly these elements, [batch, heads, seq_q, head_dim]; empty if none does."""
    bad_rows = computed.any(-1)
    if torch.equal(bad_rows, _without_key(inputs).expand_as(bad_rows)):
        return "NaN exactly in the queries that see no key: 0/0 at the end, write zeros there"
    if of_part := parts.nonfinite_cause(inputs, bad_rows, others_are_right=others_are_right):
        return of_part
    rows = row_scores(inputs)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    overflows = [name for name, dtype in dtypes.items() if _overflow(rows, bad_rows, dtype)]
    words = f"NaN or Inf exactly where exp(S) overflows {' or '.join(overflows)}: subtract the row maximum before exp"
    if reasons := [*([words] if overflows else []), *fp16_overflows(out, computed, inputs, rows)]:
        return "; or ".join(reasons)
    if bool(out[computed].isnan().all()) and (which := rows_far_below(bad_rows, inputs)):
        return f"NaN, as of 0/0, {which}: {LARGEST_WORDS}"
    return ""


def _without_key(inputs: Inputs) -> torch.Tensor:
    """The queries that see no key, [seq_q] or with batch and heads."""
    queries = torch.arange(inputs.q.shape[2], device=inputs.q.device)
    see_none, padding = all_hidden(inputs, positions_of(inputs, queries)).all(-1), parts.padding(inputs)
    return see_none if padding is None else see_none & ~padding.rows


def _overflow(rows: RowScores, bad_rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the bad rows, and no others, are those where exp(S) or its sum exceeds the largest number of `dtype`.

    Rows in which every exp(S) underflows are 0/0, and bad or zero, too.  Some of the rows must overflow and some not.
    """
    # The row sum is in float32, whatever P is rounded to.
    largest = rows.largest - math.log(torch.finfo(dtype).max)
    of_sum = rows.logsumexp - math.log(torch.finfo(torch.float32).max)
    excess = torch.maximum(largest, of_sum)  # [b, h, rows]
    sure = ((excess < UNSURE[0]) | (excess > UNSURE[1])) & (rows.largest > UNDERFLOW[dtype])
    overflows, bad = (excess > 0)[sure], rows.selection.of(bad_rows)[sure]
    return bool(overflows.any()) and not bool(overflows.all()) and torch.equal(overflows, bad)
