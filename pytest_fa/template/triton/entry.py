"""NAME: a correct starting point in Triton.  Replace the body of `attention_kernel` with your kernel."""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N = 64, 64
LOG2_E = 1.4426950408889634


def forward(q, k, v, *, scale, causal="none", out=None):
    """Return the attention output, [batch, heads, seq_q, head_dim]; write it into `out` if that is given.

    q and out: [batch, heads, seq_q, head_dim].  k and v: [batch, kv_heads, seq_k, head_dim].  Any strides are possible.
    To refuse a call, raise `pytest_fa.errors.UnsupportedCase` with the reason.
    """
    out = torch.empty_like(q) if out is None else out
    batch, heads, seq_q, head_dim = q.shape
    grid = (batch * heads, triton.cdiv(seq_q, BLOCK_M))
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()]
    with torch.cuda.device(q.device):  # Triton launches on the current device
        attention_kernel[grid](
            *(q, k, v, out),
            *strides,
            *(heads, heads // k.shape[1], seq_q, k.shape[2], scale * LOG2_E),
            HEAD_DIM=head_dim,
            CAUSAL=causal == "top_left",
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
        )
    return out


@triton.jit
def attention_kernel(
    q_gmem,  # [batch, heads, seq_q, HEAD_DIM]
    k_gmem,  # [batch, kv_heads, seq_k, HEAD_DIM]
    v_gmem,  # [batch, kv_heads, seq_k, HEAD_DIM]
    out_gmem,  # [batch, heads, seq_q, HEAD_DIM]
    q_batch, q_head, q_row, q_dim,  # strides in elements
    k_batch, k_head, k_row, k_dim,
    v_batch, v_head, v_row, v_dim,
    out_batch, out_head, out_row, out_dim,
    heads, group, seq_q, seq_k,
    scale_log2,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M query rows of one head per program, with an online softmax over tiles of BLOCK_N keys."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    kv_head = head // group
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)

    q_rows = q_gmem + batch * q_batch + head * q_head + rows.to(tl.int64)[:, None] * q_row
    q = tl.load(q_rows + dims[None, :] * q_dim, mask=rows[:, None] < seq_q, other=0.0)  # [BLOCK_M, HEAD_DIM]
    k_base = k_gmem + batch * k_batch + kv_head * k_head
    v_base = v_gmem + batch * v_batch + kv_head * v_head

    o = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    end = min(seq_k, (tl.program_id(1) + 1) * BLOCK_M) if CAUSAL else seq_k
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k_tile = k_base + keys.to(tl.int64)[:, None] * k_row + dims[None, :] * k_dim
        k = tl.load(k_tile, mask=keys[:, None] < seq_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
        s = tl.dot(q, tl.trans(k)) * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = keys[None, :] < seq_k
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))  # key 0 is visible to every row, so m is finite from the first tile on
        rescale = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        l = l * rescale + tl.sum(p, 1)
        v_tile = v_base + keys.to(tl.int64)[:, None] * v_row + dims[None, :] * v_dim
        v = tl.load(v_tile, mask=keys[:, None] < seq_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
        o = tl.dot(p.to(v.dtype), v, o * rescale[:, None])
        m = m_new

    out_rows = out_gmem + batch * out_batch + head * out_head + rows.to(tl.int64)[:, None] * out_row
    tl.store(out_rows + dims[None, :] * out_dim, (o / l[:, None]).to(q.dtype), mask=rows[:, None] < seq_q)
