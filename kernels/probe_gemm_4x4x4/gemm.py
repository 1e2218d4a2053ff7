"""probe_gemm_4x4x4: a GEMM so small that only its call can be measured.

step:    one product of 4x4 matrices by cuBLAS, and nothing else
because: an operator of 128 operations costs what a call costs: torch, cuBLAS and a launch
expect:  device_us below 2 and call_us far above it; a probe on an NVIDIA L4 once took 5.29 to 5.49 us a call
"""

from __future__ import annotations

import torch


def forward(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, heads, seq_k, head_dim]
    v: torch.Tensor,  # noqa: ARG001  # scores read none
    *,
    scale: float,
    causal: str = "none",  # noqa: ARG001  # the manifest takes no mask
    out: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k]
) -> torch.Tensor:
    """S = scale Q K^T as one batched GEMM: `torch.matmul` knows no factor, and a second kernel would be timed too."""
    queries, keys = q.flatten(0, 1), k.flatten(0, 1)  # [b * h, s, d]
    shape = (*q.shape[:3], k.shape[2])
    is_dense = out is not None and out.is_contiguous()
    scores = out.view(-1, *shape[2:]) if is_dense else q.new_empty((queries.shape[0], *shape[2:]))
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)  # beta 0: scores is not read
    if is_dense:
        return out
    return scores.view(shape) if out is None else out.copy_(scores.view(shape))
