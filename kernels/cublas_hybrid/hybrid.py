"""cublas_hybrid: attention in three calls of cuBLAS and torch.

step:    two batched matrix products and a softmax instead of one kernel
because: library matrix products use tensor cores without any CUDA code; in exchange, S and P go through global memory
expect:  18 to 30 us at the target shape (1x8x512x64): three launches, and 4 MB of S and P written and read again
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from pytest_fa.errors import UnsupportedCase


class Buffers(NamedTuple):
    """The intermediate tensors of the calls that one thread makes on one stream."""

    scores: torch.Tensor  # [batch * heads, seq_q, seq_k]
    p: torch.Tensor  # [batch * heads, seq_q, seq_k]
    hidden: torch.Tensor | None  # [seq_q, seq_k], True where the mask hides a key


_buffers: dict[tuple[object, ...], Buffers] = {}


def forward(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, heads, seq_k, head_dim]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output, [batch, heads, seq_q, head_dim]; write it into `out` if that is given.

    S and P go into the buffers of an earlier call with the same shape.

    Raises `UnsupportedCase` for a scale of zero.  All weights of a row are then equal, and P is rounded after its
    division by the row sum.  All weights get the same rounding error, which does not average out.
    """
    if scale == 0:
        raise UnsupportedCase("scale is 0, it must not be: all weights of a row would have the same rounding error")
    out = torch.empty_like(q) if out is None else out
    # Load Q, K and V.
    queries, keys, values = (tensor.flatten(0, 1) for tensor in (q, k, v))  # [b * h, s, d]
    buffers = _buffers_of(queries, keys, causal)
    # S = Q K^T, scaled
    torch.baddbmm(buffers.scores, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=buffers.scores)
    # mask
    if buffers.hidden is not None:
        buffers.scores.masked_fill_(buffers.hidden, float("-inf"))
    # row max, P = exp(S - m), row sum, normalise
    torch.softmax(buffers.scores, -1, out=buffers.p)
    # O = P V, store
    if out.is_contiguous():
        torch.bmm(buffers.p, values, out=out.view(queries.shape))
    else:
        out.copy_(torch.bmm(buffers.p, values).view(out.shape))
    return out


def _buffers_of(queries: torch.Tensor, keys: torch.Tensor, causal: str) -> Buffers:
    """Return the buffers of this thread and stream, or new ones if the shape or the mask has changed.

    Calls of one thread on one stream run one after the other.  All other calls may overlap, so they use other buffers.
    """
    device = queries.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (threading.get_ident(), device, stream)
    shape = (queries.shape[0], queries.shape[1], keys.shape[1])
    buffers = _buffers.get(key)
    fits = buffers is not None and buffers.scores.shape == shape and buffers.scores.dtype == queries.dtype
    if buffers is None or not fits or (buffers.hidden is None) != (causal == "none"):
        scores = torch.empty(shape, dtype=queries.dtype, device=device)
        hidden = None
        if causal != "none":
            hidden = torch.ones(shape[1:], dtype=torch.bool, device=device).triu(1)
        buffers = _buffers[key] = Buffers(scores, torch.empty_like(scores), hidden)
    return buffers
