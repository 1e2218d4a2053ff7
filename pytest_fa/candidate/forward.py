"""`Forward`: the call signature that every variant has."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Forward(Protocol):
    """The call signature of every variant.

    q and out are [batch, heads, seq_q, head_dim]; k and v are [batch, kv_heads, seq_k, head_dim].  Any strides are
    allowed.  For a variant that computes scores, out is [batch, heads, seq_q, seq_k].  `words` are those of the parts
    of attention (`attention.part.Part.words`): some in each call, others only in calls that have the part, such as the
    descales if q, k and v are e4m3; the output then is fp16 or bf16, as `out` is.  Further outputs are among the words
    if the variant's manifest lists them in `returns`, and a call requests them.

    Returns `out` if the variant writes into it, else a tensor that the variant allocated.
    Raises `UnsupportedCase` with the kernel's reason, `LaunchError` with the driver's reason, and `ValueError` or
    `TypeError` for arguments that do not fit together.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values, tensors and further outputs
    ) -> torch.Tensor:
        """Compute one attention forward pass, or the scores of one."""
