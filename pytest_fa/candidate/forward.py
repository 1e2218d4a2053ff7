"""`Forward`: the call signature that every variant has."""

from __future__ import annotations

from typing import Protocol

import torch


class Forward(Protocol):
    """The call signature of every variant.

    q and out are [batch, heads, seq_q, head_dim]; k and v are [batch, kv_heads, seq_k, head_dim].  Any strides are
    allowed.  `causal` is `none`, `top_left` or `bottom_right`.  For a variant that computes scores, out is
    [batch, heads, seq_q, seq_k].  `lse`, [batch, heads, seq_q] float32, receives log(sum(exp(score))) of each row; it
    is passed only to variants whose manifest has `returns: [out, lse]`.  Descales, [batch, heads] and twice
    [batch, kv_heads] float32, are passed only if q, k and v are e4m3: their values are e4m3 number times descale.  The
    output then is fp16 or bf16, as `out` is.

    Returns `out` if the variant writes into it, else a tensor that the variant allocated.
    Raises `UnsupportedCase` with the kernel's reason, `LaunchError` with the driver's reason, and `ValueError` or
    `TypeError` for arguments that do not fit together.
    """

    def __call__(  # noqa: PLR0913  # one argument for each tensor
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: str = "none",
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one attention forward pass, or the scores of one."""
