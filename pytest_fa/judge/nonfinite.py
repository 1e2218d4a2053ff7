"""Explain NaN and Inf in an output: never written, rows without a key, an exp that overflows, or computed otherwise."""

from __future__ import annotations

import math

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import Positions
from pytest_fa.attention.scores import Computes
from pytest_fa.gpu.inputs import Inputs, is_poison
from pytest_fa.judge.error_location import location_text
from pytest_fa.judge.mistaken import Selection, all_hidden

MAX_SCORES = 2**22  # scores that are computed to find the rows that overflow
# Rows whose logarithm is within this range of that of the largest number may overflow or not; below it, P V may.
UNSURE = (-2.5, 0.1)


def explain_nonfinite(
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim or seq_k]
    bad: torch.Tensor,  # the same shape: where the output is wrong
    inputs: Inputs,
    computes: Computes,
) -> str:
    """Why a wrong output has NaN or Inf; empty if it has none."""
    unwritten = is_poison(out)
    computed = ~out.isfinite() & ~unwritten
    parts = []
    if bool(unwritten.any()):
        parts.append(f"the kernel never wrote {location_text(unwritten, computes)}: the NaN poison is still there")
    if bool(computed.any()):
        place = location_text(computed, computes)
        looks = "look for 0/0, an overflow, or unwritten memory that it reads"
        reason = "" if parts or computes == "scores" else _reason(computed.any(-1), inputs)
        parts.append(reason or f"the kernel computed NaN or Inf in {place}: {looks}")
    if parts and bool((bad & out.isfinite()).any()):
        parts.append("finite elements are wrong, too")
    return "; ".join(parts)


def _reason(bad_rows: torch.Tensor, inputs: Inputs) -> str:
    """The reason that predicts exactly these rows, [batch, heads, seq_q]; empty if none does."""
    if torch.equal(bad_rows, _without_key(inputs).expand_as(bad_rows)):
        return "NaN exactly in the queries that see no key: 0/0 at the end, write zeros there"
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        if _overflow(bad_rows, inputs, dtype):
            return f"NaN or Inf exactly where exp(S) overflows {name}: subtract the row maximum before exp"
    return ""


def _without_key(inputs: Inputs) -> torch.Tensor:
    """The queries that see no key, [seq_q]."""
    return all_hidden(inputs, _positions(inputs, torch.arange(inputs.q.shape[2], device=inputs.q.device))).all(-1)


def _positions(inputs: Inputs, queries: torch.Tensor) -> Positions:
    keys = torch.arange(inputs.k.shape[2], device=queries.device)
    return Positions(queries[:, None], keys, inputs.q.shape[2], inputs.k.shape[2])


def _overflow(bad_rows: torch.Tensor, inputs: Inputs, dtype: torch.dtype) -> bool:
    """Whether the bad rows, and no others, are those where exp(S) or its sum exceeds the largest number of `dtype`.

    It compares as many rows as have MAX_SCORES scores.  Some of them must overflow and some must not.
    """
    batch, heads, seq_q = bad_rows.shape
    count = max(1, MAX_SCORES // max(1, batch * heads * inputs.k.shape[2]))
    queries = torch.arange(0, seq_q, max(1, -(-seq_q // count)), device=bad_rows.device)
    selection = Selection.all(inputs.q)._replace(queries=queries)
    k = inputs.k.repeat_interleave(heads // inputs.k.shape[1], 1).double()
    scores = (selection.of(inputs.q).double() * inputs.scale) @ k.transpose(2, 3)
    positions = _positions(inputs, queries)
    scores = parts.changed_scores(inputs, scores, positions).masked_fill(all_hidden(inputs, positions), -math.inf)
    # The row sum is in float32, whatever P is rounded to.
    largest = scores.amax(-1) - math.log(torch.finfo(dtype).max)
    of_sum = scores.logsumexp(-1) - math.log(torch.finfo(torch.float32).max)
    excess = torch.maximum(largest, of_sum)  # [b, h, rows]
    sure = (excess < UNSURE[0]) | (excess > UNSURE[1])
    overflows, bad = (excess > 0)[sure], selection.of(bad_rows)[sure]
    return bool(overflows.any()) and not bool(overflows.all()) and torch.equal(overflows, bad)
