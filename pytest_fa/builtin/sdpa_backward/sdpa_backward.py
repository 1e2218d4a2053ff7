"""The backward operators of torch's scaled_dot_product_attention, which autograd calls.

They get the output and the log-sum-exp of the forward pass, so that the time is that of the backward pass alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pytest_fa.errors import UnsupportedCase

LSE_MULTIPLE = 32  # of rows of the log-sum-exp that memory-efficient attention reads
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_aten = torch.ops.aten


def flash(
    dout: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, heads, seq_k, head_dim]
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    lse: torch.Tensor,  # [batch, heads, seq_q] fp32
    *,
    scale: float,
    causal: str = "none",
    **_: Any,  # noqa: ANN401  # buffers, in whose place torch allocates its own
) -> Gradients:
    """Return the gradients of FlashAttention-2, or on a CPU of torch's kernel of the same name.

    On a GPU, its causal mask is that of the bottom-right corner.  Raises `UnsupportedCase` if that is another one, and
    with torch's reason.
    """
    is_causal = causal == "top_left"
    if is_causal and q.is_cuda and q.shape[2] != k.shape[2]:
        raise UnsupportedCase(f"causal is top_left for {q.shape[2]} queries and {k.shape[2]} keys; it has bottom_right")
    if not q.is_cuda:
        operator = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001  # as autograd calls it
        return _or_refuse(lambda: operator(dout, q, k, v, out, lse, 0.0, is_causal, scale=scale))
    operator = _aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001  # as above
    seed, offset = _no_dropout(q.device)
    sizes = (None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, offset)
    return _or_refuse(lambda: operator(dout, q, k, v, out, lse, *sizes, scale=scale))


def cudnn(  # noqa: PLR0913  # one argument for each tensor
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    causal: str = "none",
    attn_bias: torch.Tensor | None = None,
    **_: Any,  # noqa: ANN401  # as above
) -> Gradients:
    """Return the gradients of cuDNN; see `flash`."""
    operator = _aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001  # as above
    sizes = (*_no_dropout(q.device), attn_bias, None, None, q.shape[2], k.shape[2], 0.0, causal == "top_left")
    return _or_refuse(lambda: operator(dout, q, k, v, out, lse[..., None], *sizes, scale=scale))


def efficient(  # noqa: PLR0913  # one argument for each tensor
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    causal: str = "none",
    attn_bias: torch.Tensor | None = None,
    **_: Any,  # noqa: ANN401  # as above
) -> Gradients:
    """Return the gradients of memory-efficient attention; see `flash`.

    It reads the log-sum-exp in multiples of 32 rows, and the output as [batch, seq, heads, head_dim] without gaps.
    Others are copied inside the time.
    """
    missing = -lse.shape[2] % LSE_MULTIPLE
    rows = torch.nn.functional.pad(lse, (0, missing), value=torch.inf) if missing else lse
    operator = _aten._scaled_dot_product_efficient_attention_backward  # noqa: SLF001  # as above
    rest = (*_no_dropout(q.device), 0.0, [True, True, True, False], causal == "top_left")
    dense = out.transpose(1, 2).contiguous().transpose(1, 2)
    found = _or_refuse(lambda: operator(dout, q, k, v, attn_bias, dense, rows, *rest, scale=scale))
    return found[0], found[1], found[2]


@functools.cache
def _no_dropout(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The random state that no dropout reads."""
    return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)


def _or_refuse(call: Callable[[], Gradients]) -> Gradients:
    """The result of a call.  Raises `UnsupportedCase` with torch's reason if the backend refuses it."""
    try:
        return call()
    except RuntimeError as error:
        if "CUDA error" in str(error) or type(error) is not RuntimeError:
            raise
        raise UnsupportedCase(str(error).splitlines()[0]) from None
