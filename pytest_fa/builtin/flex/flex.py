"""torch's FlexAttention, compiled for each case.

Tiles that a causal mask or a window hides are skipped: what follows from the sizes alone is computed once.  Masks and
biases, which follow from the data of a call, are read where a tile is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from pytest_fa.errors import UnsupportedCase

MAX_MASKS = 64  # that one process keeps
MAX_CASES = 1024  # that one process compiles; from the ninth on, torch would run them without a compiler
NO_KERNEL = ("No valid triton configs", "NoValidChoicesError")
LOWEST_SINK = -1e30  # in place of -inf, of which a difference may be NaN


def forward(  # noqa: PLR0913  # an argument for each part of attention
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,  # noqa: ARG001  # FlexAttention allocates its own
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    attn_bias: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k]
    alibi_slopes: torch.Tensor | None = None,  # [heads] fp32
    attn_mask: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k] bool, true where a key is visible
    sink: torch.Tensor | None = None,  # [heads] fp32
) -> torch.Tensor:
    """Return the output tensor that FlexAttention allocates, [batch, heads, seq_q, head_dim_v].

    Raises `UnsupportedCase` if none of torch's kernels fits on the GPU, as with some large head_dims.
    """
    block_mask = _block_mask(q.shape[2], k.shape[2], causal, window_left, window_right, q.device)
    try:
        return _compiled()(q, k, v, scale, block_mask, softcap, attn_bias, alibi_slopes, attn_mask, sink)
    except RuntimeError as problem:
        if not any(text in str(problem) for text in NO_KERNEL):
            raise
        raise UnsupportedCase(f"FlexAttention has no kernel for this case: {problem}".partition("\n")[0]) from problem


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    torch._dynamo.config.recompile_limit = MAX_CASES  # noqa: SLF001  # the name that torch documents
    torch._dynamo.config.accumulated_recompile_limit = MAX_CASES  # noqa: SLF001
    return torch.compile(_attend, dynamic=False, fullgraph=True)  # beyond the limit, it fails


def _attend(  # noqa: PLR0913, PLR0917  # an argument for each part of attention
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    block_mask: BlockMask | None,
    softcap: float,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    shift = k.shape[2] - q.shape[2]  # the last query stands at the last key

    def changed(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[batch, head, query, key]
        if slopes is not None:
            score = score - slopes[head] * (query + shift - key).abs()
        if mask is not None:
            score = torch.where(mask[batch, head, query, key], score, -float("inf"))
        return score

    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=changed,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sink is None or aux.lse is None:
        return out
    share = torch.sigmoid(aux.lse - sink.clamp_min(LOWEST_SINK)[:, None])  # of the keys in the row sum, [b, h, seq_q]
    return (out * share[..., None]).to(q.dtype)


@functools.lru_cache(maxsize=MAX_MASKS)
def _block_mask(  # what a mask depends on
    seq_q: int, seq_k: int, causal: str, left: int | None, right: int | None, device: torch.device
) -> BlockMask | None:
    """What a causal mask and a window leave visible; None if there is neither."""
    if causal == "none" and left is None and right is None:
        return None
    last_aligned = seq_k - seq_q
    of_causal = last_aligned if causal == "bottom_right" else 0

    def visible(_: torch.Tensor, __: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = key >= 0
        if causal != "none":
            seen = seen & (key <= query + of_causal)
        if left is not None:
            seen = seen & (key >= query + last_aligned - left)
        if right is not None:
            seen = seen & (key <= query + last_aligned + right)
        return seen

    return create_block_mask(visible, None, None, seq_q, seq_k, device=device)
