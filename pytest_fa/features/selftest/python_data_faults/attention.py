"""Attention with one mistake that shows on one data profile alone, selected by FAULT, and a correct twin.

The `step` of each variant describes its FAULT.  NONE is the twin.
"""

from __future__ import annotations

import torch

TAME = 8.0  # larger than all numbers from N(0, 1)
STEPS = 64  # factors of a product that stands for exp
OUTLIER = 4.0  # the size of a channel of K, over that of most channels
MASSIVE = 16.0  # the size of the first key, over that of each other key
LOWEST, HIGHEST = -50.0, 88.0  # of a row maximum
CLIPPED = 6.0  # of numbers in V, over their RMS
SMALLEST_NORMAL, LARGEST = 2.0**-14, 65504.0  # of fp16
TILE = 64  # keys


def forward(q, k, v, *, scale, causal="none", out=None, FAULT="NONE"):
    """Return attention, computed in float32 with P rounded to the dtype, in `out` if that is given."""
    k, v = (tensor.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    s = products(FAULT, q, k) * scale
    if causal != "none":
        shift = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + shift), -torch.inf)
    row_max = s.amax(-1, keepdim=True)
    p = weights(FAULT, s, row_max.clamp_min(-1e30))
    if FAULT == "fast_exp_of_tame_data":
        largest = torch.stack([tensor.abs().amax() for tensor in (q, k, v)])
        has_equal_keys = (k[:, :, 2:] == k[:, :, :-2]).all(-1).any()  # of two in turn
        is_tame = (largest < TAME).all() & ~has_equal_keys
        p = torch.where(is_tame, (1 + (s - row_max).clamp_min(-STEPS) / STEPS) ** STEPS, p)
    row_sum = p.sum(-1, keepdim=True)
    if FAULT == "tied_keys_counted_once":
        row_sum = row_sum - (p == 1).sum(-1, keepdim=True) + 1
    o = sums(FAULT, p.to(q.dtype).float(), k, values(FAULT, v))
    if FAULT == "one_weight_of_first_key":
        seen, weighed = ((each > least).sum(-1, keepdim=True) for each, least in ((s, -torch.inf), (p, 0)))
        o = torch.where((weighed == 1) & (seen > TILE), v[:, :, :1], o)
    if FAULT == "sum_of_values_in_dtype":
        o = o.to(q.dtype).float()
    result = torch.where(row_sum > 0, o / row_sum, 0.0).to(q.dtype)
    return result if out is None else out.copy_(result)


def products(FAULT, q, k):
    """Return Q K^T."""
    whole = q.float() @ k.mT
    if FAULT != "outlier_channels_in_dtype":
        return whole
    sizes = k.abs().median(2, keepdim=True).values  # [batch, heads, 1, head_dim]
    is_outlier = sizes > OUTLIER * sizes.median(-1, keepdim=True).values
    of_outliers = (q.float() * is_outlier) @ k.mT
    return whole - of_outliers + of_outliers.to(q.dtype).float()


def weights(FAULT, s, row_max):
    """Return exp(S - max)."""
    if FAULT == "maximum_starts_at_minus_50":
        row_max = row_max.clamp_min(LOWEST)
    if FAULT == "maximum_at_most_88":
        return torch.exp(s - row_max.clamp_max(HIGHEST)).clamp_max(LARGEST)
    return torch.exp(s - row_max)


def values(FAULT, v):
    """Return V."""
    if FAULT == "subnormal_v_flushed":
        return v.masked_fill(v.abs() < SMALLEST_NORMAL, 0.0)
    if FAULT == "outliers_of_v_clipped":
        largest = CLIPPED * v.square().mean((2, 3), keepdim=True).sqrt()
        return v.clamp(-largest, largest)
    return v


def sums(FAULT, p, k, v):
    """Return P V."""
    o = p @ v
    if FAULT == "massive_key_without_value" and k.shape[2] > 1:
        sizes = k.abs().amax(3)  # [batch, heads, seq_k]
        is_massive = sizes[..., 0] > MASSIVE * sizes[..., 1:].amax(-1)
        o = o - is_massive[..., None, None] * p[..., :1] * v[:, :, :1]
    return o
