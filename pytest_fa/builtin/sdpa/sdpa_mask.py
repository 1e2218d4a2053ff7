"""torch's scaled_dot_product_attention with `attn_mask`, for windows, boolean masks and biases.

SDPA has no argument for a window, so that each call reads a mask of all pairs of query and key.  A mask that follows
from the sizes alone is made once; one that follows from the data of a call is part of the call, and is timed.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

from .sdpa import attend_or_refuse, products_of


def forward(  # noqa: PLR0913  # an argument for each part of attention
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,  # noqa: ARG001  # SDPA allocates its own
    window_left: int | None = None,
    window_right: int | None = None,
    attn_bias: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k], in the dtype of q
    attn_mask: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k] bool, true where a key is visible
) -> torch.Tensor:
    """Return the output tensor that SDPA allocates, [batch, heads, seq_q, head_dim_v].

    In fp32, matrix products are those of fp32, as in `sdpa.forward`.

    Raises `UnsupportedCase` with torch's reasons if the pinned backend refuses the call.
    """
    visible = visible_by_position(q.shape[2], k.shape[2], causal, window_left, window_right, q.device)
    if attn_mask is not None:
        visible = attn_mask if visible is None else attn_mask & visible
    mask = visible if attn_bias is None else attn_bias
    if attn_bias is not None and visible is not None:
        mask = attn_bias.masked_fill(~visible, float("-inf"))
    grouped = q.shape[1] != k.shape[1]
    attend = functools.partial(scaled_dot_product_attention, q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    with products_of(q.dtype):
        return attend_or_refuse(attend)


@functools.lru_cache(maxsize=16)
def visible_by_position(  # what a mask depends on
    seq_q: int, seq_k: int, causal: str, left: int | None, right: int | None, device: torch.device
) -> torch.Tensor | None:
    """True where no causal mask and no window hides a key, [seq_q, seq_k]; None if there is neither.

    Under a window and under the bottom-right mask, the last query stands at the last key.
    """
    keys, queries = torch.arange(seq_k, device=device), torch.arange(seq_q, device=device)[:, None]
    distance = queries + seq_k - seq_q - keys  # of a query from a key before it
    hidden = [keys > queries] if causal == "top_left" else [distance < 0] if causal == "bottom_right" else []
    hidden += [] if left is None else [distance > left]
    hidden += [] if right is None else [-distance > right]
    return ~functools.reduce(torch.logical_or, hidden) if hidden else None
