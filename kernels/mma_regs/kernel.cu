// mma_regs: tensor cores by mma.sync; a warp keeps its rows of S, P and O in registers.
// step:    mma.sync m16n8k16 and ldmatrix in place of wmma; S and P stay in registers
// because: wmma hides where an element lies, so S, P and P V all go through shared memory
// expect:  14 to 20 us at the mission shape; no shared memory traffic but Q, K and V, and no barrier but those of the tiles
// diff:    large, since every pass through shared memory goes; what is left keeps its order
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 27 KB of shared memory per block (D = 64), 51 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, both causal corners, grouped heads; rows contiguous
//          and 16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

constexpr int WARP = 32;
constexpr int QUAD = 4;                // lanes that share a row of a fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;              // 16-bit elements in 16 bytes
constexpr int PAD = 8;                 // 16 bytes past a row move the next one by four banks
constexpr int WARPS = BLOCK_M / MMA_M;
constexpr int THREADS = WARPS * WARP;
constexpr int N_TILES = BLOCK_N / MMA_N;

static_assert(BLOCK_M % MMA_M == 0, "every warp owns 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "ldmatrix takes 16 keys at a time");

template <typename T, int HEAD_DIM>
struct Smem {
  alignas(16) T q[BLOCK_M][HEAD_DIM + PAD];
  T k[BLOCK_N][HEAD_DIM + PAD];
  T v[BLOCK_N][HEAD_DIM + PAD];
};

// What one block works on: BLOCK_M queries of one head.
template <typename T>
struct Block {
  const T* q_gmem;  // [seq_q, HEAD_DIM], row stride q_stride.seq
  const T* k_gmem;  // [seq_k, HEAD_DIM]
  const T* v_gmem;  // [seq_k, HEAD_DIM]
  int first_query;
  int seq_q, seq_k;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int tiles;     // of keys that any of these queries sees
};

template <typename T>
__device__ Block<T> find_block(const FaForwardArgs& args, unsigned heads_per_kv_head) {
  const unsigned head = blockIdx.x, batch = blockIdx.z;
  const unsigned kv_head = head / heads_per_kv_head;
  const int first_query = blockIdx.y * BLOCK_M, seq_q = args.seq_q, seq_k = args.seq_k;
  const int shift = args.causal == FA_CAUSAL_BOTTOM_RIGHT ? seq_k - seq_q : 0;
  const int diagonal = args.causal == FA_CAUSAL_NONE ? seq_k : first_query + shift + 1;
  const int keys = max(0, min(seq_k, diagonal + BLOCK_M - 1));
  return {
      static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head,
      static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head,
      static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head,
      first_query,
      seq_q,
      seq_k,
      diagonal,
      (keys + BLOCK_N - 1) / BLOCK_N,
  };
}

// Copy rows [first, first + ROWS) of [seq, HEAD_DIM], zeros past the end.
template <int ROWS, int HEAD_DIM, typename T>
__device__ void copy_rows(T (*to_smem)[HEAD_DIM + PAD], const T* from_gmem, int64_t row_stride, int first, int seq) {
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += THREADS) {
    const int row = (i + threadIdx.x) / (HEAD_DIM / VECTOR), column = (i + threadIdx.x) % (HEAD_DIM / VECTOR) * VECTOR;
    if (ROWS * HEAD_DIM / VECTOR % THREADS != 0 && row >= ROWS) break;
    uint4 piece = {};
    if (first + row < seq) piece = *reinterpret_cast<const uint4*>(from_gmem + (first + row) * row_stride + column);
    *reinterpret_cast<uint4*>(&to_smem[row][column]) = piece;
  }
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) mma_regs_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const Block<T> block = find_block<T>(args, heads_per_kv_head);
  const int first_row = warp * MMA_M + lane / QUAD;  // this lane's rows of S, P and O: this one and the eighth after it
  const float scale_log2 = args.scale * CUDART_L2E_F;  // exp(x) = 2^(x log2 e)

  // Load Q.
  copy_rows<BLOCK_M, HEAD_DIM>(smem.q, block.q_gmem, args.q_stride.seq, block.first_query, block.seq_q);

  float o[HEAD_DIM / MMA_N][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // running row max, in log2
  float l[2] = {};                              // this lane's part of the running row sum

  for (int tile = 0; tile < block.tiles; ++tile) {
    const int first_key = tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // everyone has left the last tile
    copy_rows<BLOCK_N, HEAD_DIM>(smem.k, block.k_gmem, args.k_stride.seq, first_key, block.seq_k);
    copy_rows<BLOCK_N, HEAD_DIM>(smem.v, block.v_gmem, args.v_stride.seq, first_key, block.seq_k);
    __syncthreads();  // Q, K and V are there for everyone

    // S = Q K^T
    float s[N_TILES][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
      uint32_t q[4];
      fa::ldmatrix_x4(q, fa::smem_address(&smem.q[warp * MMA_M + lane % 16][d + lane / 16 * 8]));
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        uint32_t k[4];  // of 16 keys: two for the first mma, two for the second
        fa::ldmatrix_x4(k, fa::smem_address(&smem.k[n * MMA_N + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]));
        fa::mma_m16n8k16<T>(s[n], q, k[0], k[1]);
        fa::mma_m16n8k16<T>(s[n + 1], q, k[2], k[3]);
      }
    }

    // scale
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= scale_log2;
    }

    // mask; the tile's first keys are seen by every query of the block
    if (first_key + BLOCK_N > min(block.seq_k, block.diagonal)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int limit = min(block.seq_k, block.diagonal + first_row + i / 2 * 8) - first_key;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[n][i] = -CUDART_INF_F;
        }
      }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // row max
      float m_new = m[r];
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) m_new = fmaxf(m_new, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      m_new = fa::max_of_quad(m_new);
      const float m_finite = m_new == -CUDART_INF_F ? 0.0f : m_new;  // a row that has seen no key yet: 2^(-inf - 0) = 0

      // rescale
      const float rescale = exp2f(m[r] - m_finite);
      m[r] = m_new;
      l[r] *= rescale;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
        o[d][2 * r] *= rescale;
        o[d][2 * r + 1] *= rescale;
      }

      // P = exp2(S - m), row sum
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        s[n][2 * r] = exp2f(s[n][2 * r] - m_finite);
        s[n][2 * r + 1] = exp2f(s[n][2 * r + 1] - m_finite);
        l[r] += s[n][2 * r] + s[n][2 * r + 1];
      }
    }

    // O += P V; two neighbouring fragments of S are one of P
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      const uint32_t p[4] = {fa::cvt_rn_x2<T>(s[n][0], s[n][1]), fa::cvt_rn_x2<T>(s[n][2], s[n][3]),
                             fa::cvt_rn_x2<T>(s[n + 1][0], s[n + 1][1]), fa::cvt_rn_x2<T>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
      for (int d = 0; d < HEAD_DIM / MMA_N; d += 2) {
        uint32_t v[4];  // of 16 dimensions: two for the first mma, two for the second
        fa::ldmatrix_x4_trans(v, fa::smem_address(&smem.v[n * MMA_N + lane % 16][d * MMA_N + lane / 16 * 8]));
        fa::mma_m16n8k16<T>(o[d], p, v[0], v[1]);
        fa::mma_m16n8k16<T>(o[d + 1], p, v[2], v[3]);
      }
    }
  }

  // Normalise; a row that sees no key is zero and its log-sum-exp is -inf.
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = block.first_query + first_row + r * 8;
    const float sum = fa::sum_of_quad(l[r]);
    const float inverse_l = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
      o[d][2 * r] *= inverse_l;
      o[d][2 * r + 1] *= inverse_l;
    }
    if (args.lse != nullptr && lane % QUAD == 0 && query < block.seq_q) {
      lse_gmem[query] = sum > 0.0f ? (m[r] + log2f(sum)) * CUDART_LN2_F : -CUDART_INF_F;
    }

    // Store: the lanes of a quad trade pieces, so that each has 16 bytes in a row.
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; d += QUAD) {
      uint32_t piece[4];
#pragma unroll
      for (int i = 0; i < QUAD; ++i) piece[i] = fa::cvt_rn_x2<T>(o[d + i][2 * r], o[d + i][2 * r + 1]);
      fa::transpose_quad(piece, lane);
      if (query >= block.seq_q) continue;
      T* to_gmem = out_gmem + query * args.out_stride.seq + (d + lane % QUAD) * MMA_N;
      *reinterpret_cast<uint4*>(to_gmem) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
    }
  }
}

// Whether 16-byte copies may walk a tensor's rows.
bool is_vector_aligned(const void* data, const FaStrides& stride) {
  const int64_t steps = stride.batch | stride.head | stride.seq;
  return stride.dim == 1 && steps % VECTOR == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  const bool aligned = is_vector_aligned(args->q, args->q_stride) && is_vector_aligned(args->k, args->k_stride) &&
                       is_vector_aligned(args->v, args->v_stride) && is_vector_aligned(args->out, args->out_stride);
  if (!aligned) return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of 16 bytes");
  const int64_t blocks_per_head = (args->seq_q + BLOCK_M - 1) / BLOCK_M;
  if (args->heads > INT32_MAX || args->batch > UINT16_MAX || blocks_per_head > UINT16_MAX || args->seq_k > INT32_MAX / 2) {
    return fa_refuse(args, "batch %lld or seq_q %lld is over the grid, or seq_k %lld over 2^30",
                     static_cast<long long>(args->batch), static_cast<long long>(args->seq_q),
                     static_cast<long long>(args->seq_k));
  }
  auto* kernel = &mma_regs_kernel<T, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  const dim3 grid(static_cast<unsigned>(args->heads), static_cast<unsigned>(blocks_per_head), static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(*args, static_cast<unsigned>(args->heads / args->kv_heads));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}
