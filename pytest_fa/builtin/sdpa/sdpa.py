"""torch's SDPA; the manifest's contexts pin it to one backend each, so that no kernel changes silently."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_fa.errors import UnsupportedCase

pin_flash = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
pin_cudnn = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
pin_efficient = partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
pin_math = partial(sdpa_kernel, SDPBackend.MATH)


def forward(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,  # noqa: ARG001  # SDPA allocates its own
) -> torch.Tensor:
    """SDPA's own output tensor: copying it into `out` would be charged to the backend.

    Raises `UnsupportedCase` with torch's reasons where the pinned backend refuses.
    """
    attend = partial(
        scaled_dot_product_attention,
        q,
        k,
        v,
        scale=scale,
        is_causal=causal == "top_left",
        enable_gqa=q.shape[1] != k.shape[1],
    )
    try:
        return attend()
    except RuntimeError as problem:
        if "No available kernel" not in str(problem):
            raise
    with warnings.catch_warnings(record=True) as given:  # torch gives its reasons as warnings
        warnings.simplefilter("always")
        try:
            return attend()
        except RuntimeError as problem:
            reasons = [str(each.message).split(" (Triggered")[0] for each in given]
            raise UnsupportedCase(_own_reasons(reasons) or str(problem)) from None


def _own_reasons(reasons: list[str]) -> str:
    """What the pinned backend said; the others only say that they are switched off."""
    off = ("not used because", "disabled", "not enabled")
    return "; ".join(text for text in reasons if not any(word in text for word in off))
