"""The one call shape of every variant."""

from __future__ import annotations

from typing import Protocol

import torch


class Forward(Protocol):
    """How every variant is called.

    q and out are [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim], any strides; `causal` is
    `none`, `top_left` or `bottom_right`.  Where scores are computed, out is [batch, heads, seq_q, seq_k].
    Returns `out` where the variant writes into it, else its own tensor.
    Raises `UnsupportedCase` with the kernel's reason, `LaunchError` with the driver's, `ValueError` or `TypeError` for
    arguments that do not fit together.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: str = "none",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One attention forward."""
