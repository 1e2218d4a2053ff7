// fp8_mma: both matrix products in e4m3 by mma.sync m16n8k32, for Ada (sm_89).
// step:    mma.sync m16n8k32 in e4m3 instead of m16n8k16 in fp16; P is rounded to e4m3, V is transposed by a kernel before, and
//          P V of each key tile is added to O in float32
// because: Ada's tensor cores do twice as many products in e4m3 as in fp16, and Q, K and V have half the bytes
// expect:  on Ada, two thirds of mma_regs's time at 4096 keys; on Hopper, which emulates mma.sync in e4m3 by conversions to fp16,
//          a fifth slower than mma_regs
// diff:    one operand type in place of two; descales, P's scale and V^T are new
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 15 KB of shared memory per block (D = 64), 28 KB (D = 128)
// takes:   e4m3 with an output in fp16 or bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal
//          masks, grouped heads; rows contiguous and 16-byte aligned
#include <math_constants.h>

#include "fa/e4m3.cuh"
#include "fa/entry.h"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/warp.cuh"

constexpr int WARP = 32;
constexpr int QUAD = 4;                // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 32;
constexpr int VECTOR = 16;             // e4m3 elements in 16 bytes
constexpr int PAD = 16;                // 16 bytes after each row shift the next row by four banks
constexpr int WARPS = BLOCK_M / MMA_M;
constexpr int THREADS = WARPS * WARP;
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr float P_SCALE_LOG2 = 8.0f;   // P is 256 at the row max: e4m3 holds numbers from 2^-9 to 448

static_assert(BLOCK_M % MMA_M == 0, "BLOCK_M must be a multiple of 16, because every warp owns 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "BLOCK_N must be a multiple of 32, because P V reads 32 keys at a time");
static_assert(fa::V_T_KEYS % BLOCK_N == 0, "a key tile lies within the padded rows of V^T");

template <int HEAD_DIM>
struct Smem {
  alignas(16) e4m3 q[BLOCK_M][HEAD_DIM + PAD];
  e4m3 k[BLOCK_N][HEAD_DIM + PAD];
  e4m3 v_t[HEAD_DIM][BLOCK_N + PAD];  // keys in the order of P
};

// The work of one thread block: BLOCK_M queries of one head, and all keys that they see.
struct WorkTile {
  const e4m3* q_gmem;    // [seq_q, HEAD_DIM], row stride q_stride.seq
  const e4m3* k_gmem;    // [seq_k, HEAD_DIM]
  const e4m3* v_t_gmem;  // [HEAD_DIM, v_t_keys], keys in the order of P
  int v_t_keys;
  float scale_log2;  // scale * log2(e), for exp2, times the descales of Q and K
  float v_descale;
  int first_query;
  int seq_q, seq_k;
  int diagonal;   // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int key_tiles;  // number of key tiles that any query of the block sees
};

__device__ WorkTile make_work_tile(const FaForwardArgs& args, unsigned heads_per_kv_head, int v_t_keys) {
  const unsigned head = blockIdx.x, batch = blockIdx.z;
  const unsigned kv_head = head / heads_per_kv_head;
  const int64_t kv_batch_head = batch * args.kv_heads + kv_head;
  const int first_query = blockIdx.y * BLOCK_M, seq_q = args.seq_q, seq_k = args.seq_k;
  const int shift = args.causal == FA_CAUSAL_BOTTOM_RIGHT ? seq_k - seq_q : 0;
  const int diagonal = args.causal == FA_CAUSAL_NONE ? seq_k : first_query + shift + 1;
  const int visible_keys = max(0, min(seq_k, diagonal + BLOCK_M - 1));
  return {
      static_cast<const e4m3*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head,
      static_cast<const e4m3*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head,
      static_cast<const e4m3*>(args.workspace) + kv_batch_head * args.head_dim * v_t_keys,
      v_t_keys,
      args.scale * CUDART_L2E_F * (args.q_descale[batch * args.heads + head] * args.k_descale[kv_batch_head]),
      args.v_descale[kv_batch_head],
      first_query,
      seq_q,
      seq_k,
      diagonal,
      (visible_keys + BLOCK_N - 1) / BLOCK_N,
  };
}

// Copies ROWS rows of COLUMNS elements from row first_row on; rows from `rows` on are filled with zeros.
template <int ROWS, int COLUMNS>
__device__ void copy_rows(e4m3 (*to_smem)[COLUMNS + PAD], const e4m3* from_gmem, int64_t row_stride, int first_row, int rows) {
#pragma unroll
  for (int i = 0; i < ROWS * COLUMNS / VECTOR; i += THREADS) {
    const int row = (i + threadIdx.x) / (COLUMNS / VECTOR), column = (i + threadIdx.x) % (COLUMNS / VECTOR) * VECTOR;
    if (ROWS * COLUMNS / VECTOR % THREADS != 0 && row >= ROWS) break;
    uint4 elements = {};
    if (first_row + row < rows) elements = *reinterpret_cast<const uint4*>(from_gmem + (first_row + row) * row_stride + column);
    *reinterpret_cast<uint4*>(&to_smem[row][column]) = elements;
  }
}

// S += Q K^T of the 16 queries of a warp.
template <int HEAD_DIM>
__device__ __forceinline__ void multiply_qk(float (&s)[N_TILES][4], const Smem<HEAD_DIM>& smem, int warp, int lane) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += MMA_K) {
    uint32_t q[4];
    fa::ldmatrix_x4(q, fa::smem_address(&smem.q[warp * MMA_M + lane % 16][d + lane / 16 * 16]));
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      uint32_t k[4];  // B fragments of 16 keys: 0 and 1 for the first mma, 2 and 3 for the second
      fa::ldmatrix_x4(k, fa::smem_address(&smem.k[n * MMA_N + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 16]));
      fa::mma_m16n8k32_e4m3(s[n], q, k[0], k[1]);
      fa::mma_m16n8k32_e4m3(s[n + 1], q, k[2], k[3]);
    }
  }
}

// Hides the keys that a query does not see.
__device__ __forceinline__ void mask(float (&s)[N_TILES][4], const WorkTile& work, int lane_row, int first_key, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int limit = min(work.seq_k, work.diagonal + lane_row + i / 2 * 8) - first_key;
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[n][i] = -CUDART_INF_F;
      }
    }
}

template <typename Out, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) fp8_mma_kernel(const FaForwardArgs args, unsigned heads_per_kv_head, int v_t_keys) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<HEAD_DIM>& smem = *reinterpret_cast<Smem<HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const WorkTile work = make_work_tile(args, heads_per_kv_head, v_t_keys);
  const int lane_row = warp * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8 of S, P and O

  // Load Q.
  copy_rows<BLOCK_M, HEAD_DIM>(smem.q, work.q_gmem, args.q_stride.seq, work.first_query, work.seq_q);

  float o[HEAD_DIM / MMA_N][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // running row max, in log2
  float l[2] = {};                              // this lane's part of the running row sum

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // all threads are done with the previous tile
    copy_rows<BLOCK_N, HEAD_DIM>(smem.k, work.k_gmem, args.k_stride.seq, first_key, work.seq_k);
    copy_rows<HEAD_DIM, BLOCK_N>(smem.v_t, work.v_t_gmem + first_key, work.v_t_keys, 0, HEAD_DIM);
    __syncthreads();  // Q, K and V are visible to all threads

    // S = Q K^T
    float s[N_TILES][4] = {};
    multiply_qk(s, smem, warp, lane);

    // scale
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= work.scale_log2;
    }

    // mask; only tiles that cross the diagonal or the last key need it
    if (first_key + BLOCK_N > min(work.seq_k, work.diagonal)) {
      mask(s, work, lane_row, first_key, lane);
    }

    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // row max
      float m_new = m[r];
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) m_new = fmaxf(m_new, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      m_new = fa::max_of_quad(m_new);
      const float m_finite = m_new == -CUDART_INF_F ? 0.0f : m_new;  // no key seen yet: exp2(-inf - 0) = 0

      // rescale
      rescale[r] = exp2f(m[r] - m_finite);
      m[r] = m_new;
      l[r] *= rescale[r];

      // P = exp2(S - m) 2^P_SCALE_LOG2, row sum
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        s[n][2 * r] = exp2f(s[n][2 * r] - (m_finite - P_SCALE_LOG2));
        s[n][2 * r + 1] = exp2f(s[n][2 * r + 1] - (m_finite - P_SCALE_LOG2));
        l[r] += s[n][2 * r] + s[n][2 * r + 1];
      }
    }

    // P V of this tile; four adjacent accumulator fragments of S form one A fragment of P
    float pv[HEAD_DIM / MMA_N][4] = {};
#pragma unroll
    for (int n = 0; n < N_TILES; n += MMA_K / MMA_N) {
      uint32_t p[4];
      fa::make_p_fragment(p, s, n);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / MMA_N; d += 2) {
        uint32_t v[4];  // B fragments of 16 dimensions: 0 and 1 for the first mma, 2 and 3 for the second
        fa::ldmatrix_x4(v, fa::smem_address(&smem.v_t[d * MMA_N + lane / 16 * 8 + lane % 8][n * MMA_N + lane / 8 % 2 * 16]));
        fa::mma_m16n8k32_e4m3(pv[d], p, v[0], v[1]);
        fa::mma_m16n8k32_e4m3(pv[d + 1], p, v[2], v[3]);
      }
    }

    // O = O rescale + P V, in float32: the tensor cores keep 13 bits of a sum of products in e4m3
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = o[d][i] * rescale[i / 2] + pv[d][i];
    }
  }

  // Normalise.  A row that sees no key is zero, and its log-sum-exp is -inf.
  Out* out_gmem = static_cast<Out*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = work.first_query + lane_row + r * 8;
    const float sum = fa::sum_of_quad(l[r]);
    const float inverse_l = sum == 0.0f ? 0.0f : work.v_descale / sum;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
      o[d][2 * r] *= inverse_l;
      o[d][2 * r + 1] *= inverse_l;
    }
    if (args.lse != nullptr && lane % QUAD == 0 && query < work.seq_q) {
      lse_gmem[query] = sum == 0.0f ? -CUDART_INF_F : (m[r] - P_SCALE_LOG2 + log2f(sum)) * CUDART_LN2_F;
    }

    // Store.  The lanes of a quad exchange registers, so that each lane stores 16 contiguous bytes.
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; d += QUAD) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < QUAD; ++i) packed[i] = fa::cvt_rn_x2<Out>(o[d + i][2 * r], o[d + i][2 * r + 1]);
      fa::transpose_quad(packed, lane);
      if (query >= work.seq_q) continue;
      Out* to_gmem = out_gmem + query * args.out_stride.seq + (d + lane % QUAD) * MMA_N;
      *reinterpret_cast<uint4*>(to_gmem) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

template <typename Out, int HEAD_DIM>
int launch_to(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa::check_e4m3_alignment(args)) return status;
  const int64_t blocks_per_head = (args->seq_q + BLOCK_M - 1) / BLOCK_M;
  const bool fits = args->heads <= INT32_MAX && args->kv_heads <= UINT16_MAX && args->batch <= UINT16_MAX &&
                    blocks_per_head <= UINT16_MAX && args->seq_k <= INT32_MAX / 2;
  if (!fits) {
    return fa_refuse(args, "the shape is too large: batch %lld and kv_heads %lld (at most %d), heads %lld (at most %d), "
                           "seq_q %lld (at most %d), seq_k %lld (below 2^30)",
                     static_cast<long long>(args->batch), static_cast<long long>(args->kv_heads), UINT16_MAX,
                     static_cast<long long>(args->heads), INT32_MAX,
                     static_cast<long long>(args->seq_q), UINT16_MAX * BLOCK_M, static_cast<long long>(args->seq_k));
  }
  auto* kernel = &fp8_mma_kernel<Out, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<HEAD_DIM>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  const dim3 grid(static_cast<unsigned>(args->heads), static_cast<unsigned>(blocks_per_head), static_cast<unsigned>(args->batch));
  if (args->seq_k > 0) {
    if (int status = fa::launch_transpose_v<HEAD_DIM>(args, stream)) return status;
  }
  kernel<<<grid, THREADS, smem_bytes, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads),
                                                static_cast<int>(fa::v_t_keys(args)));
  return static_cast<int>(cudaPeekAtLastError());
}

template <typename DTYPE, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  if (args->out_dtype == FA_DTYPE_fp16) return launch_to<fp16, HEAD_DIM>(args, stream);
  if (args->out_dtype == FA_DTYPE_bf16) return launch_to<bf16, HEAD_DIM>(args, stream);
  return fa_refuse(args, "no instantiation for an output of dtype %d", args->out_dtype);
}

FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) { return static_cast<size_t>(fa::v_t_bytes(args)); }

FA_FORWARD(launch)
