"""Attention whose gradients are taken by autograd: a correct twin, and an exploit.  Each is the target of a variant."""

from __future__ import annotations

import math

import torch


def right(q, k, v, *, scale, causal="none", out=None):
    """Return attention in float32; autograd rounds no matrix between, as it rounds those of the backward pass."""
    group, (seq_q, seq_k) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
    s = scale * (q.float() @ k.mT)
    if causal != "none":
        last = torch.arange(seq_q, device=q.device)[:, None] + (seq_k - seq_q if causal == "bottom_right" else 0)
        s = s.masked_fill(torch.arange(seq_k, device=q.device) > last, -math.inf)
    # a row that sees no key is zero
    p = torch.exp(s - s.detach().amax(-1, keepdim=True).clamp_min(-1e30))
    return (p @ v / p.sum(-1, keepdim=True).clamp_min(1e-30)).to(q.dtype)


class ByLibrary(torch.autograd.Function):
    """Attention that saves nothing but its inputs, and has torch's backward operator do the rest."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        """Return attention, and keep what it read."""
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return right(q, k, v, scale=scale)

    @staticmethod
    def backward(ctx, dout):
        """Return the gradients of torch's operator."""
        q, k, v = ctx.saved_tensors
        s = ctx.scale * (q.float() @ k.float().mT)
        lse, out = torch.logsumexp(s, -1), (torch.softmax(s, -1) @ v.float()).to(q.dtype)
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*operator(dout, q, k, v, out, lse, 0.0, False, scale=ctx.scale), None)


def by_library(q, k, v, *, scale, causal="none", out=None):
    return ByLibrary.apply(q, k, v, scale)
