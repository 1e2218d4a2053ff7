"""probe_gemm_4x4x4: a GEMM so small that its time is the time of the call.

step:    one product of two 4x4 matrices by cuBLAS, and nothing else
because: an operator of 128 operations costs as much as its call: torch, cuBLAS and a launch
expect:  device_us below 2 and call_us far above it; a probe on an NVIDIA L4 once took 5.29 to 5.49 us per call
"""

from __future__ import annotations

import torch


def forward(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, heads, seq_k, head_dim]
    v: torch.Tensor,  # noqa: ARG001  # scores do not depend on v
    *,
    scale: float,
    causal: str = "none",  # noqa: ARG001  # the manifest supports no mask
    out: torch.Tensor | None = None,  # [batch, heads, seq_q, seq_k]
) -> torch.Tensor:
    """Return the scores scale * Q K^T, [batch, heads, seq_q, seq_k]; write them into `out` if that is given.

    One `torch.baddbmm` applies the scale too.  With `torch.matmul`, a second kernel would be needed and timed.
    """
    queries, keys = q.flatten(0, 1), k.flatten(0, 1)  # [b * h, s, d]
    shape = (*q.shape[:3], k.shape[2])
    is_dense = out is not None and out.is_contiguous()
    scores = out.view(-1, *shape[2:]) if is_dense else q.new_empty((queries.shape[0], *shape[2:]))
    # with beta=0, the first argument is not read
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
    if is_dense:
        return out
    return scores.view(shape) if out is None else out.copy_(scores.view(shape))
