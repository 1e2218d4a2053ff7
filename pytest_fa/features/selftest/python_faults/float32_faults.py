"""Attention in float32: a correct twin, and a kernel with one mistake.  Each function is the target of one variant."""

from __future__ import annotations

import math

import torch

TF32_CUT_BITS = 13  # float32 has 23 bits of mantissa, tf32 has 10


def right_float32(q, k, v, *, scale, causal="none", out=None):
    """Write attention computed in float32 into `out`, [batch, heads, seq_q, head_dim]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.transpose(2, 3) * scale
    if causal != "none":
        shift = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + shift), -math.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp_min(-1e30))
    return out.copy_(p @ v / p.sum(-1, keepdim=True).clamp_min(1e-30))


def undeclared_tf32(q, k, v, *, scale, causal="none", out=None):
    return right_float32(tf32(q), tf32(k), tf32(v), scale=scale, causal=causal, out=out)


def tf32(x):
    """Round to tf32: to nearest, ties away from zero, as `cvt.rna.tf32.f32` does."""
    bits = x.contiguous().view(torch.int32)
    half = 1 << (TF32_CUT_BITS - 1)
    return ((bits + half) >> TF32_CUT_BITS << TF32_CUT_BITS).view(torch.float32)
