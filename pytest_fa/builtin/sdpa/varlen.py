"""torch's `varlen_attn`, for sequences behind one another, also beside a cache in pages.  It runs FlashAttention-2."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from pytest_fa.errors import UnsupportedCase


def forward(  # noqa: PLR0913  # an argument for each part of attention
    q: torch.Tensor,  # [1, heads, rows, head_dim]
    k: torch.Tensor,  # [1, kv_heads, rows, head_dim], or a cache [pages, kv_heads, page_size, head_dim]
    v: torch.Tensor,
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,  # noqa: ARG001  # torch allocates its own
    cu_seqlens_q: torch.Tensor,  # [batch + 1] int32
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqlens_q: torch.Tensor | None = None,  # noqa: ARG001  # which a call with starts does not have
    seqlens_k: torch.Tensor | None = None,  # [batch] int32, beside pages
    block_table: torch.Tensor | None = None,  # [batch, n] int32
) -> torch.Tensor:
    """Return the output, [1, heads, rows, head_dim]; rows behind the last sequence are undefined.

    Raises `UnsupportedCase` for what the `varlen_attn` of this torch does not have.
    """
    words: dict[str, Any] = {} if math.isclose(scale, q.shape[3] ** -0.5) else {"scale": scale}
    attend, known = _varlen_attn()
    if causal == "bottom_right":
        words |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if q.shape[1] != k.shape[1]:
        words["enable_gqa"] = True
    if block_table is None:
        k, v = (rows[0].transpose(0, 1) for rows in (k, v))
    else:
        k, v = (cache.transpose(1, 2) for cache in (k, v))
        words |= {"seqused_k": seqlens_k, "block_table": block_table}
    if missing := words.keys() - known:
        raise UnsupportedCase(f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}")
    longest = (max_seqlen_q, max_seqlen_k)
    output: torch.Tensor = attend(q[0].transpose(0, 1), k, v, cu_seqlens_q, cu_seqlens_k, *longest, **words)
    return output.transpose(0, 1)[None]


@functools.cache
def _varlen_attn() -> tuple[Callable[..., Any], frozenset[str]]:
    """Torch's function and its parameters.  Raises `UnsupportedCase` if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  # older releases lack it
    except ImportError:
        raise UnsupportedCase(f"torch {torch.__version__} has no varlen_attn") from None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)
