"""What a backward call gets of its forward pass, and the judge computes: the output, rounded, and the log-sum-exp."""

from __future__ import annotations

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import DOUT, LSE, OUT
from pytest_fa.attention.backward import PART as BACKWARD
from pytest_fa.attention.grouped_heads import repeated
from pytest_fa.attention.lse import PART as LOG_SUM_EXP
from pytest_fa.attention.lse import exact_lse, finite
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.truth import block_positions, hidden_keys, rows_per_block


def with_results(inputs: Inputs) -> Inputs:
    """The call with the results of its forward pass; the call itself if it has them, or is no backward call."""
    needs_them = DOUT in inputs.extra and OUT not in inputs.extra
    return computed_results(inputs, torch.float64) if needs_them else inputs


def computed_results(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """A backward call with the results of its forward pass, computed in a dtype.

    The log-sum-exp is in the conventions of the call.
    """
    meant = inputs.meant()
    k, v = (repeated(tensor.to(dtype), meant.q.shape[1]) for tensor in (meant.k, meant.v))
    dout = inputs.extra[DOUT]
    out = torch.empty_like(dout)
    lse = dout.new_empty((*meant.q.shape[:3], 1), dtype=torch.float32)
    queries, step = meant.q.shape[2], rows_per_block(meant)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        out[:, :, rows], lse[:, :, rows, 0] = _results_of(meant, k, v, rows)
    given = LOG_SUM_EXP.rows_given(lse, inputs.conventions)
    with_both: Inputs = BACKWARD.call_given(inputs._replace(extra={**inputs.extra, OUT: out, LSE: given}))
    return with_both


def _results_of(
    inputs: Inputs, k: torch.Tensor, v: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, heads, rows, head_dim_v], [batch, heads, rows]
    """The output and the log-sum-exp of some queries, in the dtype of k and v, which have the heads of q."""
    positions, hidden = block_positions(inputs, rows), hidden_keys(inputs, rows)
    products = (inputs.q[:, :, rows].to(k.dtype) * inputs.scale) @ k.transpose(2, 3)
    scores = parts.changed_scores(inputs, products, positions)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    sinks = parts.sinks(inputs, positions)
    lse = exact_lse(scores, sinks)
    out = (scores - finite(lse)[..., None]).exp().to(v.dtype) @ v
    return out, exact_lse(scores) if inputs.conventions.get("lse_has_sink") == "false" else lse
