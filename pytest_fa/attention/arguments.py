"""The arguments that every call has; `gpu.inputs.Inputs` adds what only some calls have."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Arguments(NamedTuple):
    """Three tensors, the scale, and the words that the parts of attention always pass (`Part.always`)."""

    q: torch.Tensor  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor  # [batch, kv_heads, seq_k, head_dim_v]
    scale: float
    causal: str  # none | top_left | bottom_right
