"""torch's scaled_dot_product_attention, pinned to one backend per variant.

The `context` of each variant in the manifest selects the backend, so torch cannot switch to another kernel silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pytest_fa.errors import UnsupportedCase

# How torch says that a backend has no kernel for a call: before it asks cuDNN, and when cuDNN has none for a head_dim.
REFUSALS = ("No available kernel", "cuDNN Frontend error")

pin_flash = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
pin_cudnn = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
pin_efficient = partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
pin_math = partial(sdpa_kernel, SDPBackend.MATH)


def forward(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,  # noqa: ARG001  # SDPA allocates its own
) -> torch.Tensor:
    """Return the output tensor that SDPA allocates; a copy into `out` would be timed as part of the backend.

    In fp32, matrix products are those of fp32, whatever the candidate or the environment has allowed.

    Raises `UnsupportedCase` with torch's reasons if the pinned backend refuses the call.
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
    with products_of(q.dtype):
        return attend_or_refuse(attend)


def products_of(dtype: torch.dtype) -> AbstractContextManager[None]:
    """The context in which a backend multiplies matrices of a dtype."""
    return fp32_products() if dtype == torch.float32 else nullcontext()


@contextmanager
def fp32_products() -> Iterator[None]:
    """Let torch compute products of fp32 matrices in fp32, not in tf32 or bf16, while this context is active.

    A candidate may have allowed those with `set_float32_matmul_precision`, and an environment variable may, too.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def attend_or_refuse(attend: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The output of a call.  Raises `UnsupportedCase` with torch's reasons if the pinned backend refuses it."""
    try:
        return attend()
    except RuntimeError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
    with warnings.catch_warnings(record=True) as caught:  # torch issues its reasons as warnings
        warnings.simplefilter("always")
        try:
            return attend()
        except RuntimeError as error:
            reasons = [str(warning.message).split(" (Triggered")[0] for warning in caught]
            raise UnsupportedCase(_reasons_of_pinned_backend(reasons) or str(error)) from None


def _reasons_of_pinned_backend(reasons: list[str]) -> str:
    """Return the reasons of the pinned backend, without those of the backends that are switched off."""
    switched_off = ("not used because", "disabled", "not enabled")
    return "; ".join(text for text in reasons if not any(phrase in text for phrase in switched_off))
