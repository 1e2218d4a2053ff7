"""flash_attention_3: from the package `flash_attn_3` or from the extension that `FLASH_ATTN_3_LIBRARY` names.

step:    FlashAttention-3's forward kernel, called through the operator of its package
because: for long sequences on Hopper GPUs it is the fastest published kernel, faster than cuDNN in most causal calls
expect:  on an H200 at S = 4096 and 32 heads: 0.96 of the FLOP rate of cuDNN without a mask, and 1.2 times it with
         a causal mask at D = 64, 1.0 and 1.25 times it at D = 128
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pytest_fa.errors import UnsupportedCase

LIBRARY = "FLASH_ATTN_3_LIBRARY"
LEFT_OUT = "This flash attention build does not support"
OPEN = -1  # what the operator takes for an open side of a window
NO_E4M3 = ("does not support FP8", "only supports fp16 and bf16")  # by how it was built; by the GPU


def forward(  # noqa: PLR0913  # an argument for each part of attention
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim], or a cache [pages, kv_heads, page_size, head_dim]
    v: torch.Tensor,  # the same
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    seqlens_k: torch.Tensor | None = None,  # [batch] int32
    block_table: torch.Tensor | None = None,  # [batch, n] int32
) -> torch.Tensor:
    """Return the attention output, [batch, heads, seq_q, head_dim]; write it into `out` if that is given.

    The operator takes views of shape [batch, seq, heads, head_dim]; its causal mask and its window are those of the
    bottom-right corner.  It chooses the number of splits of the keys, and may combine them in a second kernel.

    Raises `UnsupportedCase` if FlashAttention-3 is missing or cannot be loaded, for the top-left mask unless there
    are as many queries as keys, and for a part that its build leaves out.
    """
    sides = {"window_size_left": window_left, "window_size_right": window_right}
    options: dict[str, Any] = {name: OPEN if side is None else side for name, side in sides.items()}
    has_window = (window_left, window_right) != (None, None)
    modified = {**(options if has_window else {}), **({"softcap": softcap} if softcap else {})}
    if seqlens_k is not None:
        modified |= {"seqused_k": seqlens_k, "page_table": block_table}
    try:
        return _attend(q, k, v, scale, causal, out, **modified)
    except RuntimeError as problem:
        reason = str(problem).splitlines()[0] if str(problem) else ""
        if LEFT_OUT not in reason:
            raise
        raise UnsupportedCase(f"FlashAttention-3 was built without it: {reason}") from problem


def forward_e4m3(  # noqa: PLR0913  # one argument for each tensor
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim] e4m3
    k: torch.Tensor,  # [batch, heads, seq_k, head_dim] e4m3
    v: torch.Tensor,  # [batch, heads, seq_k, head_dim] e4m3
    *,
    scale: float,
    q_descale: torch.Tensor,  # [batch, heads] fp32
    k_descale: torch.Tensor,  # [batch, heads] fp32
    v_descale: torch.Tensor,  # [batch, heads] fp32
    causal: str = "none",
    out: torch.Tensor | None = None,  # [batch, heads, seq_q, head_dim] bf16
) -> torch.Tensor:
    """Return the attention output of e4m3 tensors in bf16, the only dtype that the operator then writes.

    Its descale of Q is that of a head of K, so heads cannot share keys and values.

    Raises `UnsupportedCase` as `forward` does, and if this FlashAttention-3 or this GPU has no e4m3.
    """
    try:
        return _attend(q, k, v, scale, causal, out, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    except RuntimeError as problem:
        reason = str(problem).splitlines()[0] if str(problem) else ""
        if not any(text in reason for text in NO_E4M3):
            raise
        remedy = "it needs a GPU of compute capability 9.0, and a build without FLASH_ATTENTION_DISABLE_FP8"
        raise UnsupportedCase(f"FlashAttention-3 has no e4m3 here: {reason}; {remedy}") from problem


def backward(  # noqa: PLR0913  # an argument for each part of attention
    dout: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # the same
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    lse: torch.Tensor,  # [batch, heads, seq_q] fp32
    *,
    scale: float,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    causal: str = "none",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> None:
    """Write the gradients of q, k and v.

    Raises `UnsupportedCase` as `forward` does.
    """
    if causal == "top_left" and q.shape[2] != k.shape[2]:
        raise UnsupportedCase(f"causal is top_left for {q.shape[2]} queries and {k.shape[2]} keys; use bottom_right")
    sides = {"window_size_left": window_left, "window_size_right": window_right}
    options: dict[str, Any] = {name: OPEN if side is None else side for name, side in sides.items()}
    options |= {"softmax_scale": scale, "is_causal": causal != "none", "deterministic": deterministic}
    tensors = (each.transpose(1, 2) for each in (dout, q, k, v, out))  # [batch, seq, heads, head_dim]
    gradients = (each.transpose(1, 2) for each in (dq, dk, dv))
    _operator()  # loads the extension
    try:
        torch.ops.flash_attn_3.bwd(*tensors, lse, *gradients, softcap=softcap or 0.0, **options)
    except RuntimeError as problem:
        reason = str(problem).splitlines()[0] if str(problem) else ""
        if LEFT_OUT not in reason:
            raise
        raise UnsupportedCase(f"FlashAttention-3 was built without it: {reason}") from problem


backward_deterministic = functools.partial(backward, deterministic=True)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: str,
    out: torch.Tensor | None,
    **more: Any,  # noqa: ANN401  # descales, sides of a window, a cap
) -> torch.Tensor:
    if causal == "top_left" and (q.shape[2] != k.shape[2] or "seqused_k" in more):
        raise UnsupportedCase(f"causal is top_left for {q.shape[2]} queries and {k.shape[2]} keys; use bottom_right")
    queries, keys, values = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [batch, seq, heads, head_dim]
    options = {"softmax_scale": scale, "is_causal": causal != "none", "num_splits": 0, **more}
    output = None if out is None else out.transpose(1, 2)
    written = _operator()(queries, keys, values, out=output, **options)[0]
    return written.transpose(1, 2) if out is None else out


@functools.cache
def _operator() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the operator `flash_attn_3::fwd`.  Raises `UnsupportedCase` if its extension cannot be loaded."""
    path = os.environ.get(LIBRARY)
    try:
        if path:
            _load_extension(Path(path))
        else:
            importlib.import_module("flash_attn_3._C")
    except (ImportError, OSError) as problem:
        remedy = f"install flash_attn_3, or set {LIBRARY} to the path of its extension"
        raise UnsupportedCase(f"FlashAttention-3 cannot be loaded: {problem}; {remedy}") from problem
    operator: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.flash_attn_3.fwd
    return operator


def _load_extension(path: Path) -> None:
    """Load an extension file, after the CUDA runtime beside it if there is one."""
    for runtime in sorted(path.parent.glob("libcudart.so.*[0-9]")):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))
