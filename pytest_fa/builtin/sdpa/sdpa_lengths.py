"""torch's scaled_dot_product_attention for sequences with lengths of their own, also in pages.

SDPA has no argument for lengths, pages or new keys.  Each call writes new keys into their slots, gathers the pages into
dense copies of K and V, clears what is behind a length, and makes a mask: less work for the kernel, and more for its
user, all of which is timed.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

from .sdpa import attend_or_refuse, products_of


def forward(  # noqa: PLR0913  # an argument for each part of attention
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim], or a cache [pages, kv_heads, page_size, head_dim]
    v: torch.Tensor,  # the same with head_dim_v
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,  # noqa: ARG001  # SDPA allocates its own
    seqlens_q: torch.Tensor | None = None,  # [batch] int32
    seqlens_k: torch.Tensor | None = None,  # [batch] int32
    block_table: torch.Tensor | None = None,  # [batch, n] int32
    k_new: torch.Tensor | None = None,  # [batch, kv_heads, seq_q, head_dim], appended to k
    v_new: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output, [batch, heads, seq_q, head_dim_v]; rows behind a number of queries are undefined.

    Raises `UnsupportedCase` with torch's reasons if the pinned backend refuses the call.
    """
    if k_new is not None and v_new is not None and seqlens_k is not None:
        append(k, k_new, seqlens_k, block_table)
        append(v, v_new, seqlens_k, block_table)
    if block_table is not None:
        k, v = (gathered(cache, block_table) for cache in (k, v))
    lengths_k, lengths_q = (
        torch.full_like(q[:, 0, 0, :1], tensor.shape[2], dtype=torch.int32) if of is None else of[:, None]
        for of, tensor in ((seqlens_k, k), (seqlens_q, q))
    )
    keys, queries = (torch.arange(tensor.shape[2], device=q.device) for tensor in (k, q))
    is_key = (keys < lengths_k)[:, None, None]  # [batch, 1, 1, seq_k]
    visible = is_key.expand(-1, 1, len(queries), -1)
    if causal == "bottom_right":
        own = queries[:, None] + (lengths_k - lengths_q)[:, None, None]  # [batch, 1, seq_q, 1]
        visible = visible & (keys <= own)
    k, v = (tensor.masked_fill(~is_key.transpose(2, 3), 0.0) for tensor in (k, v))
    grouped = q.shape[1] != k.shape[1]
    attend = functools.partial(
        scaled_dot_product_attention, q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped
    )
    with products_of(q.dtype):
        return attend_or_refuse(attend).masked_fill(~visible.any(-1, keepdim=True), 0.0)


def gathered(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The keys of all sequences, [batch, kv_heads, n * page_size, dim], as a copy."""
    return cache[block_table.clamp(0, cache.shape[0] - 1)].transpose(1, 2).flatten(2, 3)


def append(
    cache: torch.Tensor,  # as k
    new: torch.Tensor,  # [batch, kv_heads, n, dim]
    seqlens_k: torch.Tensor,  # [batch]
    block_table: torch.Tensor | None,
) -> None:
    """Write new keys or values into the last n slots of each sequence."""
    slots = seqlens_k[:, None] - new.shape[2] + torch.arange(new.shape[2], device=new.device)  # [batch, n]
    blocks = torch.arange(len(new), device=new.device)[:, None]
    if block_table is not None:
        blocks, slots = block_table.gather(1, slots // cache.shape[2]), slots % cache.shape[2]
    cache[blocks, :, slots] = new.transpose(1, 2)
