"""reference_backward: the backward pass in torch.

step:    the backward pass in torch, in fp32, one tile of keys against one tile of queries
because: the algorithm of every backward kernel, readable on one screen and runnable without a GPU
expect:  correct everywhere; slow, because every tile operation is a torch call
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BLOCK_M = 128  # queries per tile
BLOCK_N = 128  # keys per tile


class Scores(NamedTuple):
    """What becomes of the scaled products of a tile."""

    changed: torch.Tensor  # [b, h, m, n], the scores of the softmax
    slope: torch.Tensor | float  # the derivative of each by its product
    hidden: torch.Tensor  # [b or 1, h or 1, m, n], the keys that a query does not see


class Parts(NamedTuple):
    """The parts of attention; each changes the scores or hides keys."""

    causal: str
    softcap: float
    window_left: int | None
    window_right: int | None
    attn_bias: torch.Tensor | None  # [batch, heads, seq_q, seq_k]
    alibi_slopes: torch.Tensor | None  # [heads] fp32
    attn_mask: torch.Tensor | None  # [batch, heads, seq_q, seq_k] bool, true where a key is visible
    queries: int | torch.Tensor  # of each sequence, [batch, 1, 1, 1] if they differ
    keys: int | torch.Tensor

    def apply(self, s: torch.Tensor, first_row: int, first_column: int) -> Scores:
        """Return the scores of scaled products, [b, h, m, n], of queries and keys from these on."""
        rows = torch.arange(first_row, first_row + s.shape[2], device=s.device)[:, None]  # [m, 1]
        columns = torch.arange(first_column, first_column + s.shape[3], device=s.device)  # [n]
        tile = (..., slice(first_row, first_row + s.shape[2]), slice(first_column, first_column + s.shape[3]))
        slope: torch.Tensor | float = 1.0
        if self.softcap:
            tanh = torch.tanh(s / self.softcap)
            s, slope = self.softcap * tanh, 1 - tanh * tanh
        position = rows + (self.keys - self.queries)  # the last query of a sequence stands at its last key
        if self.attn_bias is not None:
            s = s + self.attn_bias[tile].float()
        if self.alibi_slopes is not None:
            s = s - self.alibi_slopes.view(-1, 1, 1) * (columns - position).abs()
        hidden = (columns >= self.keys) | (rows >= self.queries) | (s == float("-inf"))  # a bias may hide a key
        if self.causal != "none":
            hidden = hidden | (columns > (position if self.causal == "bottom_right" else rows))
        if self.window_left is not None:
            hidden = hidden | (columns < position - self.window_left)
        if self.window_right is not None:
            hidden = hidden | (columns > position + self.window_right)
        if self.attn_mask is not None:
            hidden = hidden | ~self.attn_mask[tile]
        return Scores(s, slope, hidden)


def padded(
    rows: torch.Tensor,  # [1, heads, rows, dim], sequences behind one another
    starts: torch.Tensor,  # [batch + 1]
    longest: int,
) -> torch.Tensor:
    """Return `longest` rows of each sequence, [batch, heads, longest, dim]; behind its own there are others."""
    if not rows.shape[2]:
        return rows.new_zeros((len(starts) - 1, rows.shape[1], longest, *rows.shape[3:]))
    numbers = starts[:-1, None] + torch.arange(longest, device=rows.device)  # [batch, longest]
    return rows[0][:, numbers.clamp_max(rows.shape[2] - 1)].transpose(0, 1)


def write_rows(
    out: torch.Tensor,  # [1, heads, rows] or with a further axis, sequences behind one another
    result: torch.Tensor,  # [batch, heads, longest] or with a further axis
    starts: torch.Tensor,  # [batch + 1]
) -> None:
    """Write the rows of each sequence; those behind the last one stay.  The CPU waits for nothing."""
    row = torch.arange(out.shape[2], device=out.device, dtype=starts.dtype)
    sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp_max(len(result) - 1)  # [rows]
    own = result[sequence, :, (row - starts[sequence]).clamp_max(result.shape[2] - 1)].transpose(0, 1)
    is_own = (row < starts[-1]).view(-1, *[1] * (out.dim() - 3))
    out[0].copy_(torch.where(is_own, own, out[0]))


def gradients(  # noqa: PLR0913  # an argument for each part of attention
    dout: torch.Tensor,  # [batch, heads, seq_q, head_dim_v]
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim_v], of the forward pass
    lse: torch.Tensor,  # [batch, heads, seq_q] fp32, of the forward pass
    *,
    scale: float,
    causal: str = "none",
    dq: torch.Tensor,  # as q
    dk: torch.Tensor,  # as k
    dv: torch.Tensor,  # as v
    dlse: torch.Tensor | None = None,  # [batch, heads, seq_q] fp32
    softcap: float = 0.0,  # scores become softcap * tanh(score / softcap); 0 for none
    window_left: int | None = None,  # keys that a query sees before its own position; None for all
    window_right: int | None = None,  # and after it
    attn_bias: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k], added to the scores after the cap
    alibi_slopes: torch.Tensor | None = None,  # [heads] fp32, times the distance of query and key
    attn_mask: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k] bool, true where a key is visible
    sink: torch.Tensor | None = None,  # [heads] fp32; the log-sum-exp already has it
    seqlens_q: torch.Tensor | None = None,  # [batch] int32, queries of each sequence; its other rows are not written
    seqlens_k: torch.Tensor | None = None,  # [batch] int32, keys of each sequence
    dbias: torch.Tensor | None = None,  # as attn_bias, but 1 along each axis along which that is the same
    dsink: torch.Tensor | None = None,  # as sink
) -> None:
    """Write the gradients of q, k and v, and those of the bias and the sink if they are asked for.

    P = exp(S - lse), dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = dS K, dK = dS^T Q, dV = P^T dO.
    dbias is dS before the derivative of the cap, and dsink = -sum(exp(sink - lse) rowsum(dO O)).
    """
    seq_q, seq_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    queries, keys = (
        longest if lengths is None else lengths.view(-1, 1, 1, 1)
        for longest, lengths in ((seq_q, seqlens_q), (seq_k, seqlens_k))
    )
    parts = Parts(causal, softcap or 0.0, window_left, window_right, attn_bias, alibi_slopes, attn_mask, queries, keys)
    # padding may hold NaN
    is_query, is_key = (  # [seq_q, 1] and [seq_k, 1], or with the batch
        torch.arange(longest, device=q.device)[:, None] < own for longest, own in ((seq_q, queries), (seq_k, keys))
    )
    q32, do, o = (torch.where(is_query, tensor.float(), 0.0) for tensor in (q, dout, out))
    k32, v32 = (torch.where(is_key, each.float(), 0.0).repeat_interleave(group, dim=1) for each in (k, v))
    delta = (do * o).sum(-1, keepdim=True)  # [batch, heads, seq_q, 1]
    if dlse is not None:
        delta = delta - dlse[..., None]
    sums = torch.zeros_like(q32), torch.zeros_like(k32), torch.zeros_like(v32)
    of_bias = None if dbias is None else torch.zeros_like(dbias, dtype=torch.float32)
    for n in range(0, seq_k, BLOCK_N):
        of_keys = slice(n, n + BLOCK_N)
        for m in range(0, seq_q, BLOCK_M):
            of_queries = slice(m, m + BLOCK_M)
            tiles = (tensor[:, :, of_queries] for tensor in (q32, do, delta, lse[..., None]))
            q_tile, do_tile, delta_tile, lse_tile = tiles
            k_tile, v_tile = k32[:, :, of_keys], v32[:, :, of_keys]
            s = parts.apply(scale * (q_tile @ k_tile.mT), m, n)
            p = torch.exp(s.changed - lse_tile).masked_fill(s.hidden, 0.0)
            dp = do_tile @ v_tile.mT
            ds = (p * (dp - delta_tile)).masked_fill(s.hidden, 0.0)
            if of_bias is not None:
                part = of_bias[:, :, of_queries if of_bias.shape[2] > 1 else slice(None), of_keys]
                part += ds.sum_to_size(part.shape)
            ds = ds * s.slope
            sums[0][:, :, of_queries] += scale * (ds @ k_tile)
            sums[1][:, :, of_keys] += scale * (ds.mT @ q_tile)
            sums[2][:, :, of_keys] += p.mT @ do_tile
    of_groups = (each.unflatten(1, (-1, group)).sum(2) for each in sums[1:])
    for gradient, result, is_own in zip((dq, dk, dv), (sums[0], *of_groups), (is_query, is_key, is_key), strict=True):
        gradient.copy_(torch.where(is_own, result.to(gradient.dtype), gradient))
    if dbias is not None:
        dbias.copy_(of_bias)
    if dsink is not None:
        p_of_sink = torch.exp(sink.view(-1, 1, 1) - lse[..., None])  # NaN where neither is finite
        dsink.copy_(torch.where(is_query, -p_of_sink.nan_to_num(0.0) * delta, 0.0).sum((0, 2, 3)))


def backward(  # noqa: PLR0913  # as `gradients`
    dout: torch.Tensor,  # [batch, heads, seq_q, head_dim_v]
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim_v]
    lse: torch.Tensor,  # [batch, heads, seq_q] fp32
    *,
    cu_seqlens_q: torch.Tensor | None = None,  # [batch + 1] int32: tensors are [1, heads, rows, dim], and
    cu_seqlens_k: torch.Tensor | None = None,  # sequence b has its rows from [b] to [b + 1]
    max_seqlen_q: int = 0,  # at least the longest sequence
    max_seqlen_k: int = 0,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dlse: torch.Tensor | None = None,
    **words: Any,  # noqa: ANN401  # of several types
) -> None:
    """Write `gradients`, also of sequences behind one another; `words` are its other arguments."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        gradients(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, dlse=dlse, **words)
        return
    dout, q, out, lse, dlse = (
        None if each is None else padded(each, cu_seqlens_q, max_seqlen_q) for each in (dout, q, out, lse, dlse)
    )
    k, v = (padded(each, cu_seqlens_k, max_seqlen_k) for each in (k, v))
    found = [torch.zeros_like(each) for each in (q, k, v)]
    lengths = {"seqlens_q": cu_seqlens_q.diff(), "seqlens_k": cu_seqlens_k.diff()}
    gradients(
        dout, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), found, strict=True)), dlse=dlse, **lengths, **words
    )
    for gradient, result, starts in zip((dq, dk, dv), found, (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k), strict=True):
        write_rows(gradient, result, starts)
