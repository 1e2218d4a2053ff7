"""Right attention whose bits depend on what else is computed, and a correct twin.

In float64, the order of a sum changes no bit of an output in 16 bits.  In float32, it does.
"""

from __future__ import annotations

import math

import torch

FEW_QUERIES = 100  # with fewer, `bits_by_queries` computes in float32


def attend(q, k, v, scale, causal, dtype=torch.float64):
    """Return attention computed in a dtype, [batch, heads, seq_q, head_dim]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.to(dtype) @ k.to(dtype).transpose(2, 3) * scale
    if causal != "none":
        shift = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + shift)
        scores = scores.masked_fill(hidden, -math.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e30))
    row_sum = p.sum(-1, keepdim=True)
    if dtype == torch.float32:
        p = p.to(q.dtype).to(dtype)
    return (p @ v.to(dtype) / row_sum.clamp_min(1e-30)).to(q.dtype)


def bits_by(is_in_float32):
    """Make a target that computes in float32 where `is_in_float32(q, num_splits)` is true, for each batch."""

    def forward(q, k, v, *, scale, causal="none", num_splits=0, out=None):
        in_float32 = attend(q, k, v, scale, causal, torch.float32)
        return out.copy_(torch.where(is_in_float32(q, num_splits), in_float32, attend(q, k, v, scale, causal)))

    return forward


def _each(q, value):
    return torch.full((q.shape[0], 1, 1, 1), value, device=q.device)


def _first(q, _):
    return (torch.arange(q.shape[0], device=q.device) == 0)[:, None, None, None]


right_in_any_company = bits_by(lambda q, _: _each(q, False))  # the value of each batch
bits_by_batches = bits_by(lambda q, _: _each(q, q.shape[0] == 1))
bits_by_place = bits_by(_first)
bits_by_queries = bits_by(lambda q, _: _each(q, q.shape[2] < FEW_QUERIES))
bits_by_splits = bits_by(lambda q, num_splits: _each(q, num_splits > 1))
