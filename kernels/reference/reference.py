"""reference: tiled online softmax in torch.

step:    tiled online softmax in torch, in fp32, one tile of queries against one tile of keys
because: the algorithm of every rung, readable on one screen and runnable without a GPU
expect:  correct everywhere; slow, because every tile operation is a torch call
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK_M = 128  # queries per tile
BLOCK_N = 128  # keys per tile


def hidden_keys(  # a side of a window each
    rows: torch.Tensor,  # [m, 1], the queries of a tile
    columns: torch.Tensor,  # [1, n], its keys
    keys: int | torch.Tensor,  # of each sequence, [b, 1, 1, 1] if they differ
    last_aligned: int | torch.Tensor,  # how many more keys than queries it has
    causal: str,
    window_left: int | None,
    window_right: int | None,
) -> torch.Tensor:
    """Return which keys of a tile its queries do not see, [m or 1, n] or with the batch."""
    hidden = columns >= keys
    if causal != "none":
        hidden = hidden | (columns > rows + (last_aligned if causal == "bottom_right" else 0))
    if window_left is not None:
        hidden = hidden | (columns < rows + last_aligned - window_left)
    if window_right is not None:
        hidden = hidden | (columns > rows + last_aligned + window_right)
    return hidden


def with_axes(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as factors of [batch, kv_heads, seq_k, dim]."""
    return scale[..., None] if scale.dim() > 1 else scale.view(1, -1, 1, 1)


def gathered(
    cache: torch.Tensor,  # [pages, kv_heads, page_size, dim]
    block_table: torch.Tensor,  # [batch, n]; entries behind the last page of a sequence may be any number
) -> torch.Tensor:
    """Return the keys of all sequences, [batch, kv_heads, n * page_size, dim]; NaN for a page that the cache lacks."""
    pages = block_table.clamp(0, cache.shape[0] - 1)
    keys = cache[pages].masked_fill((pages != block_table)[..., None, None, None], float("nan"))
    return keys.transpose(1, 2).flatten(2, 3)


def append(
    caches: tuple[tuple[torch.Tensor, torch.Tensor | None], ...],  # each with the new keys or values, if there are some
    seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Write n new keys or values, [batch, kv_heads, n, dim], into the last slots of each sequence."""
    for cache, new in caches:  # [batch, kv_heads, seq_k, dim], or in pages [pages, kv_heads, page_size, dim]
        if new is None or seqlens_k is None:
            continue
        keys = seqlens_k[:, None] - new.shape[2] + torch.arange(new.shape[2], device=new.device)  # [batch, n]
        block = torch.arange(len(new), device=new.device)[:, None]
        if block_table is not None:
            block, keys = block_table.gather(1, keys // cache.shape[2]), keys % cache.shape[2]
        cache[block, :, keys] = new.transpose(1, 2)


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


def attention(  # noqa: C901, PLR0913, PLR0915  # an argument and a condition for each part of attention
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,  # [batch, heads, seq_q] fp32
    softcap: float = 0.0,  # scores become softcap * tanh(score / softcap); 0 for none
    window_left: int | None = None,  # keys that a query sees before its own position; None for all
    window_right: int | None = None,  # and after it
    attn_bias: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k], added to the scores after the cap
    alibi_slopes: torch.Tensor | None = None,  # [heads] fp32, times the distance of query and key
    attn_mask: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k] bool, true where a key is visible
    sink: torch.Tensor | None = None,  # [heads] fp32, a score of each head that has no value
    seqlens_q: torch.Tensor | None = None,  # [batch] int32, queries of each sequence; its other rows are not written
    seqlens_k: torch.Tensor | None = None,  # [batch] int32, keys of each sequence
    block_table: torch.Tensor | None = None,  # [batch, n] int32: k and v are caches [pages, kv_heads, page_size, dim]
    k_scale: torch.Tensor | None = None,  # [1], [kv_heads] or [batch, kv_heads, seq_k] fp32, of e4m3 or int8 numbers
    v_scale: torch.Tensor | None = None,  # the same of v; with pages [pages, kv_heads, page_size]
    k_new: torch.Tensor | None = None,  # [batch, kv_heads, seq_q, dim], to be written into the last keys of k
    v_new: torch.Tensor | None = None,  # the same of v
) -> torch.Tensor:
    """Return attention, [batch, heads, seq_q, head_dim_v]; write it into `out` if that is given.

    If `lse` is given, write log(sum(exp(score))) of each row into it; a sink is part of the sum.  Under a window,
    and for ALiBi, the last query of a sequence stands at its last key.
    All heads are computed at once, one tile of queries after the other.
    """
    out = q.new_empty((*q.shape[:3], v.shape[3])) if out is None else out
    append(((k, k_new), (v, v_new)), seqlens_k, block_table)
    if k_scale is not None and v_scale is not None:
        k, v = (numbers.float() * with_axes(scale) for numbers, scale in ((k, k_scale), (v, v_scale)))
    if block_table is not None:
        keys_of_bias = next((each.shape[3] for each in (attn_bias, attn_mask) if each is not None), None)
        k, v = (gathered(cache, block_table)[:, :, :keys_of_bias] for cache in (k, v))
    heads_per_kv_head = q.shape[1] // k.shape[1]
    if heads_per_kv_head > 1:
        k, v = (tensor.repeat_interleave(heads_per_kv_head, dim=1) for tensor in (k, v))
    queries = q.shape[2] if seqlens_q is None else seqlens_q[:, None, None, None]  # of each sequence
    keys = k.shape[2] if seqlens_k is None else seqlens_k[:, None, None, None]
    last_aligned = keys - queries
    for start_m in range(0, q.shape[2], BLOCK_M):
        # Load Q.
        q_tile = q[:, :, start_m : start_m + BLOCK_M].float() * scale  # [b, h, m, d]
        rows = torch.arange(start_m, start_m + q_tile.shape[2], device=q.device)[:, None]  # [m, 1]
        o = q_tile.new_zeros((*q_tile.shape[:3], v.shape[3]))  # [b, h, m, d_v]
        m = torch.full_like(q_tile[..., :1], float("-inf"))  # running row max
        l = torch.zeros_like(m)  # running row sum
        if sink is not None:  # the first score of each row, without a value
            m = torch.maximum(m, sink[:, None, None])
            l = (m > float("-inf")).to(m.dtype)
        for start_n in range(0, k.shape[2], BLOCK_N):
            # Load K.
            k_tile = k[:, :, start_n : start_n + BLOCK_N].float()  # [b, h, n, d]
            # S = Q K^T
            s = q_tile @ k_tile.transpose(2, 3)  # [b, h, m, n]
            # soft cap
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            # bias
            columns = torch.arange(start_n, start_n + k_tile.shape[2], device=q.device)[None, :]  # [1, n]
            tile = (..., slice(start_m, start_m + BLOCK_M), slice(start_n, start_n + BLOCK_N))
            if attn_bias is not None:
                s = s + attn_bias[tile].float()
            if alibi_slopes is not None:
                s = s - alibi_slopes[:, None, None] * (rows + last_aligned - columns).abs()
            # mask
            if attn_mask is not None:
                s = s.masked_fill(~attn_mask[tile], float("-inf"))
            hidden = hidden_keys(rows, columns, keys, last_aligned, causal, window_left, window_right)
            s = s.masked_fill(hidden, float("-inf"))
            # row max; it is -inf if no key is seen yet, and then exp(-inf - 0) = 0
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            m_finite = m_new.masked_fill(m_new == float("-inf"), 0.0)
            # rescale
            rescale = torch.exp(m - m_finite)
            m = m_new
            # P = exp(S - m), row sum
            p = torch.exp(s - m_finite)
            l = l * rescale + p.sum(-1, keepdim=True)
            # Load V.
            v_tile = v[:, :, start_n : start_n + BLOCK_N].float()  # [b, h, n, d_v]
            if seqlens_k is not None:  # V may be NaN behind the last key, and 0 * NaN is NaN
                v_tile = v_tile.masked_fill(columns[0, :, None] >= keys, 0.0)
            # O += P V
            o = o * rescale + p @ v_tile
        # Normalise and store. A row that sees no key is zero.
        o = torch.where(l == 0, torch.zeros_like(o), o / l).to(q.dtype)
        block = out[:, :, start_m : start_m + BLOCK_M]
        block.copy_(o if seqlens_q is None else torch.where(rows < queries, o, block))
        if lse is not None:  # -inf + log(0) = -inf in a row that sees no key
            lse[:, :, start_m : start_m + BLOCK_M] = (m + torch.log(l))[..., 0]
    return out


def forward(  # noqa: PLR0913  # four arguments for sequences behind one another
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    *,
    cu_seqlens_q: torch.Tensor | None = None,  # [batch + 1] int32: q and out are [1, heads, rows, dim], and
    cu_seqlens_k: torch.Tensor | None = None,  # sequence b has its rows from [b] to [b + 1]; the same of k and v
    max_seqlen_q: int = 0,  # at least the longest sequence
    max_seqlen_k: int = 0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    **words: Any,  # noqa: ANN401  # of several types
) -> torch.Tensor:
    """Return the output of `attention`, also for sequences behind one another; `words` are its other arguments."""
    if cu_seqlens_q is None:
        return attention(q, k, v, out=out, lse=lse, **words)
    of_queries = cu_seqlens_q.diff()
    words["seqlens_q"] = of_queries
    if cu_seqlens_k is not None:
        k, v = (padded(each, cu_seqlens_k, max_seqlen_k) for each in (k, v))
        words["seqlens_k"] = cu_seqlens_k.diff()
    out = q.new_empty((*q.shape[:3], v.shape[3])) if out is None else out
    queries = padded(q, cu_seqlens_q, max_seqlen_q)
    rows_of = None if lse is None else queries.new_empty(queries.shape[:3], dtype=torch.float32)
    result = attention(queries, k, v, lse=rows_of, **words)
    write_rows(out, result, cu_seqlens_q)
    if lse is not None and rows_of is not None:
        write_rows(lse, rows_of, cu_seqlens_q)
    return out
