"""reference_e4m3: tiled online softmax in torch, with both matrix products on e4m3 numbers.

step:    tiled online softmax on e4m3 inputs in torch; P is scaled to 256 and rounded to e4m3 before its product with V
because: it shows what a kernel must do with descales and with P if both matrix products read e4m3
expect:  correct everywhere, with a relative RMS error of 2 to 2.7 % from the rounding of P; slow, like its parent
"""

from __future__ import annotations

import math

import torch

BLOCK_M = 128  # queries per tile
BLOCK_N = 128  # keys per tile
P_SCALE = 256.0  # P <= 1 becomes <= 256, below 448, the largest e4m3 number; small P stay normal numbers


def forward(  # noqa: PLR0913  # one argument for each tensor
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim] e4m3
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim] e4m3
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim] e4m3
    *,
    scale: float,
    q_descale: torch.Tensor,  # [batch, heads] fp32
    k_descale: torch.Tensor,  # [batch, kv_heads] fp32
    v_descale: torch.Tensor,  # [batch, kv_heads] fp32
    causal: str = "none",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,  # [batch, heads, seq_q] fp32
) -> torch.Tensor:
    """Return the attention output, [batch, heads, seq_q, head_dim]; write it into `out` if that is given, else fp16.

    The value of an element is its e4m3 number times the descale of its head.  The descales of Q and K are part of the
    scale of the scores, that of V a factor of the output.
    If `lse` is given, write log(sum(exp(score))) of each row into it.
    """
    out = torch.empty_like(q, dtype=torch.float16) if out is None else out
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.float().repeat_interleave(group, dim=1) for tensor in (k, v))
    k_descale, v_descale = (descale.repeat_interleave(group, dim=1) for descale in (k_descale, v_descale))
    factor = (q_descale * k_descale * scale)[..., None, None]  # [b, h, 1, 1]
    shift = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
    for start_m in range(0, q.shape[2], BLOCK_M):
        # Load Q.
        q_tile = q[:, :, start_m : start_m + BLOCK_M].float()  # [b, h, m, d]
        rows = torch.arange(start_m, start_m + q_tile.shape[2], device=q.device)[:, None]  # [m, 1]
        o = torch.zeros_like(q_tile)
        m = torch.full_like(q_tile[..., :1], -math.inf)  # running row max
        l = torch.zeros_like(m)  # noqa: E741  # running row sum, times P_SCALE
        for start_n in range(0, k.shape[2], BLOCK_N):
            # S = Q K^T
            k_tile = k[:, :, start_n : start_n + BLOCK_N]  # [b, h, n, d]
            s = q_tile @ k_tile.transpose(2, 3) * factor  # [b, h, m, n]
            # mask; after the scale, because -inf * 0 is NaN and the descale of a head of zeros is 0
            if causal != "none":
                columns = torch.arange(start_n, start_n + k_tile.shape[2], device=q.device)[None, :]  # [1, n]
                s = s.masked_fill(columns > rows + shift, -math.inf)
            # row max; it is -inf if no key is seen yet, and then exp(-inf - 0) = 0
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            m_finite = m_new.masked_fill(m_new == -math.inf, 0.0)
            # rescale
            rescale = torch.exp(m - m_finite)
            m = m_new
            # P = 256 exp(S - m), row sum
            p = P_SCALE * torch.exp(s - m_finite)
            l = l * rescale + p.sum(-1, keepdim=True)  # noqa: E741
            # O += P V
            o = o * rescale + p.to(torch.float8_e4m3fn).float() @ v[:, :, start_n : start_n + BLOCK_N]
        # Normalise and store. A row that sees no key is zero.
        o = torch.where(l == 0, torch.zeros_like(o), o / l) * v_descale[..., None, None]
        out[:, :, start_m : start_m + BLOCK_M] = o.to(out.dtype)
        if lse is not None:  # -inf + log(0) = -inf in a row that sees no key
            lse[:, :, start_m : start_m + BLOCK_M] = (m + torch.log(l / P_SCALE))[..., 0]
    return out
