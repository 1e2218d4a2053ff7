"""The backward pass in torch with one mistake, selected by FAULT, and a correct twin.

The `step` of each variant describes its FAULT.  NONE is the twin.
"""

from __future__ import annotations

import math

import torch

TILE = 64  # keys of a block
LARGEST_DP = 200.0  # of a kernel that clamps dP: 25 times its standard deviation with head_dim 64
LOWEST = -1e30  # in place of the log-sum-exp of a query that sees nothing
FAULTY_HEADS = 2  # with which one of them shows; no property uses two heads
CALLS = {"dq_flickers": 0}
KEPT = {}  # gradients by shape


def backward(dout, q, k, v, out, lse, *, dq, dk, dv, dbias=None, dsink=None, FAULT="NONE", **words):
    """Write the gradients; `words` are those of `differentiate`."""
    *gradients, of_scores, of_sink = differentiate(dout, q, k, v, out, lse, FAULT=FAULT, **words)
    if FAULT == "kept_by_shape":
        gradients = KEPT.setdefault((q.shape, k.shape, v.shape), gradients)
    if dbias is not None:
        of_scores = words["scale"] * of_scores if FAULT == "dbias_scaled" else of_scores
        dbias.copy_((of_scores[:1] if FAULT == "dbias_of_first_batch" else of_scores).sum_to_size(dbias.shape))
    if dsink is not None:
        of_sink = (of_sink[:1] if FAULT == "dsink_of_first_batch" else of_sink).sum((0, 2, 3))
        dsink.copy_(of_sink.roll(-1) if FAULT == "dsink_of_next_head" else of_sink)
    lengths = [words.get(name) for name in ("seqlens_q", "seqlens_k", "seqlens_k")]
    if FAULT == "dk_zeroes_padding":
        lengths[1] = None
    for buffer, gradient, own in zip((dq, dk, dv), gradients, lengths, strict=True):
        result = gradient.to(buffer.dtype)
        buffer.copy_(result if own is None else torch.where(is_row(own, buffer), result, buffer))
    if FAULT == "dq_flickers":
        CALLS[FAULT] += 1
        if CALLS[FAULT] % 3 == 0 and q.shape[1] == FAULTY_HEADS:
            dq.view(torch.int16)[0, 0, 0, 0] ^= 1


def is_row(lengths, tensor):
    """Which rows of a tensor belong to a sequence, [batch, 1, rows, 1]."""
    return torch.arange(tensor.shape[2], device=tensor.device)[:, None] < lengths.view(-1, 1, 1, 1)


def differentiate(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    scale,
    causal,
    softcap=0.0,
    dlse=None,  # [batch, heads, seq_q]
    seqlens_q=None,  # [batch]
    seqlens_k=None,
    attn_bias=None,  # [batch, heads, seq_q, seq_k]
    sink=None,  # [heads]
    FAULT="NONE",
):
    """Return dq, dk, dv and dS in float32, and what each query adds to dsink, [batch, heads, seq_q, 1] or None.

    Padding, which may hold NaN, counts as zero.
    """
    group, seq_k = q.shape[1] // k.shape[1], k.shape[2]
    own_q, own_k = (
        torch.ones_like(each[:1, :1, :, :1], dtype=torch.bool) if lengths is None else is_row(lengths, each)
        for each, lengths in ((q, seqlens_q), (k, seqlens_k))
    )
    q, dout, out = (torch.where(own_q, each.float(), 0.0) for each in (q, dout, out))
    k, v = (torch.where(own_k, each.float(), 0.0).repeat_interleave(group, 1) for each in (k, v))
    lse = torch.where(own_q, lse[..., None], 0.0)

    s, slope = scale * (q @ k.mT), 1.0
    if softcap:
        tanh = torch.tanh(s / softcap)
        s, slope = softcap * tanh, 1.0 if FAULT == "cap_slope_missing" else 1 - tanh * tanh
    s = s if attn_bias is None else s + attn_bias.float()
    hidden = ~own_q | ~own_k.mT | (s == -math.inf) | is_masked(causal, q, k, seqlens_q, seqlens_k)
    p = torch.exp2(s - lse) if FAULT == "lse_in_base_2" else torch.exp(s - lse)
    p = p.masked_fill(hidden, 0.0)

    dp = dout @ v.mT
    if FAULT == "clamped_dp":
        dp = dp.clamp(-LARGEST_DP, LARGEST_DP)
    delta = (dout * out).sum(-1, keepdim=True)
    if FAULT == "delta_missing":
        delta = torch.zeros_like(delta)
    if FAULT == "delta_of_next_row":
        delta = delta.roll(-1, 2)
    if dlse is not None and FAULT != "dlse_ignored":
        delta = delta - dlse[..., None]
    of_scores = p.where(hidden, p * (dp - delta))  # 0 if hidden
    ds = of_scores * slope
    if FAULT == "ds_one_key_too_wide":
        wider = hidden & is_masked(causal, q, k, seqlens_q, seqlens_k, shift=1)
        ds = torch.exp(s - lse).masked_fill(wider, 0.0) * (dp - delta) * slope

    kept = seq_k // TILE * TILE if FAULT == "dq_last_block_lost" else seq_k
    dq = scale * (ds[..., :kept] @ k[:, :, :kept])
    dk = (1.0 if FAULT == "dk_scale_missing" else scale) * (ds.mT @ q)
    if FAULT == "dv_unnormalised":
        p = torch.exp(s - s.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)).masked_fill(hidden, 0.0)
    dk, dv = (each.unflatten(1, (-1, group)) for each in (dk, p.mT @ dout))
    of_sink = None if sink is None else -delta * torch.exp(sink.view(-1, 1, 1) - lse.clamp_min(LOWEST))
    return dq, dk[:, :, -1] if FAULT == "dk_of_last_head" else dk.sum(2), dv.sum(2), of_scores, of_sink


def is_masked(causal, q, k, seqlens_q, seqlens_k, shift=0):
    """Which keys a causal mask hides, [batch or 1, 1, seq_q, seq_k]; `shift` more keys are seen."""
    queries, keys = (
        each.shape[2] if lengths is None else lengths.view(-1, 1, 1, 1)
        for each, lengths in ((q, seqlens_q), (k, seqlens_k))
    )
    rows, columns = (torch.arange(each.shape[2], device=q.device) for each in (q, k))
    if causal == "none":
        return torch.zeros(1, dtype=torch.bool, device=q.device)
    last = rows[:, None] + shift + (keys - queries if causal == "bottom_right" else 0)
    return columns > last
