// wmma: tensor cores through nvcuda::wmma; S, P and P V go through shared memory.
// step:    S = Q K^T and P V by 16x16x16 tensor-core products instead of multiply-adds; 16 rows per warp at once
// because: light_barriers does 2 x 64 multiply-adds per score on FP32 units, at a sixteenth of the rate of tensor cores
// expect:  ten to twenty times faster than light_barriers; moving S, P and P V through shared memory takes most of the
//          remaining time
// diff:    large, because the code now works on 16x16 fragments instead of single products; D = 128 needs no extra code
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 54 KB of shared memory per block (D = 64), 94 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped
//          heads; rows contiguous and 16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>
#include <mma.h>

#include "fa/launch.h"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

namespace wmma = nvcuda::wmma;
using fp16 = __half;
using bf16 = __nv_bfloat16;

constexpr int WARP = 32;
constexpr int WMMA_TILE = 16;          // wmma's M, N and K
constexpr int VECTOR = 8;              // 16-bit elements in 16 bytes
constexpr int PAD = 8;                 // 16 bytes after each row shift the next row by four banks
constexpr int WARPS = BLOCK_M / WMMA_TILE;
constexpr int THREADS = WARPS * WARP;
constexpr int LANES_PER_ROW = 8;       // lanes per row of S and O: they access 128 contiguous bytes, without bank conflicts
constexpr int COLUMNS = LANES_PER_ROW * 4;  // columns that the lanes of a row access at once
constexpr int ROWS_PER_PASS = WARP / LANES_PER_ROW;
constexpr int ROWS_PER_LANE = WMMA_TILE / ROWS_PER_PASS;

static_assert(BLOCK_M % WMMA_TILE == 0, "BLOCK_M must be a multiple of 16, because every warp owns 16 queries");
static_assert(BLOCK_N % COLUMNS == 0, "every lane must own the same number of scores of a row");

template <typename T, int HEAD_DIM>
struct Smem {
  alignas(16) T q[BLOCK_M][HEAD_DIM + PAD];
  T k[BLOCK_N][HEAD_DIM + PAD];
  T v[BLOCK_N][HEAD_DIM + PAD];
  T p[BLOCK_M][BLOCK_N + PAD];
  alignas(32) float s[BLOCK_M][(BLOCK_N > HEAD_DIM ? BLOCK_N : HEAD_DIM) + PAD];  // S, and later P V of the same tile
};

// The work of one thread block: BLOCK_M queries of one head, and all keys that they see.
template <typename T>
struct WorkTile {
  const T* q_gmem;  // [seq_q, HEAD_DIM], row stride q_stride.seq
  const T* k_gmem;  // [seq_k, HEAD_DIM]
  const T* v_gmem;  // [seq_k, HEAD_DIM]
  int first_query;
  int seq_q, seq_k;
  int diagonal;   // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int key_tiles;  // number of key tiles that any query of the block sees
};

template <typename T>
__device__ WorkTile<T> make_work_tile(const FaForwardArgs& args, unsigned heads_per_kv_head) {
  const unsigned head = blockIdx.x, batch = blockIdx.z;
  const unsigned kv_head = head / heads_per_kv_head;
  const int first_query = blockIdx.y * BLOCK_M, seq_q = args.seq_q, seq_k = args.seq_k;
  const int shift = args.causal == FA_CAUSAL_BOTTOM_RIGHT ? seq_k - seq_q : 0;
  const int diagonal = args.causal == FA_CAUSAL_NONE ? seq_k : first_query + shift + 1;
  const int visible_keys = max(0, min(seq_k, diagonal + BLOCK_M - 1));
  return {
      static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head,
      static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head,
      static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head,
      first_query,
      seq_q,
      seq_k,
      diagonal,
      (visible_keys + BLOCK_N - 1) / BLOCK_N,
  };
}

// Copies rows [first_row, first_row + ROWS) of a [seq, HEAD_DIM] tensor; rows from seq on are filled with zeros.
template <int ROWS, int HEAD_DIM, typename T>
__device__ void copy_rows(T (*to_smem)[HEAD_DIM + PAD], const T* from_gmem, int64_t row_stride, int first_row, int seq) {
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += THREADS) {
    const int row = (i + threadIdx.x) / (HEAD_DIM / VECTOR), column = (i + threadIdx.x) % (HEAD_DIM / VECTOR) * VECTOR;
    if (ROWS * HEAD_DIM / VECTOR % THREADS != 0 && row >= ROWS) break;
    uint4 elements = {};
    if (first_row + row < seq) elements = *reinterpret_cast<const uint4*>(from_gmem + (first_row + row) * row_stride + column);
    *reinterpret_cast<uint4*>(&to_smem[row][column]) = elements;
  }
}

using Accumulator = wmma::fragment<wmma::accumulator, WMMA_TILE, WMMA_TILE, WMMA_TILE, float>;
template <typename T>
using A = wmma::fragment<wmma::matrix_a, WMMA_TILE, WMMA_TILE, WMMA_TILE, T, wmma::row_major>;
template <typename T, typename Layout>
using B = wmma::fragment<wmma::matrix_b, WMMA_TILE, WMMA_TILE, WMMA_TILE, T, Layout>;

__device__ __forceinline__ float max_of_row(float x) {
  for (int step = LANES_PER_ROW / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ __forceinline__ float sum_of_row(float x) {
  for (int step = LANES_PER_ROW / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) wmma_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const WorkTile<T> work = make_work_tile<T>(args, heads_per_kv_head);
  const int warp_row = warp * WMMA_TILE;                 // first of the 16 rows of S, P and O of this warp
  const int lane_row = warp_row + lane / LANES_PER_ROW;  // first of this lane's rows, which are ROWS_PER_PASS apart
  const int lane_column = lane % LANES_PER_ROW * 4;      // first of this lane's columns: 4 of every COLUMNS
  const float scale_log2 = args.scale * CUDART_L2E_F;  // exp(x) = 2^(x log2 e)

  // Load Q.
  copy_rows<BLOCK_M, HEAD_DIM>(smem.q, work.q_gmem, args.q_stride.seq, work.first_query, work.seq_q);

  float o[ROWS_PER_LANE][HEAD_DIM / COLUMNS][4] = {};
  float m[ROWS_PER_LANE];       // running row max, in log2
  float l[ROWS_PER_LANE] = {};  // this lane's part of the running row sum
  float rescale[ROWS_PER_LANE];
  for (float& row_max : m) row_max = -CUDART_INF_F;

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // all threads are done with the previous tile
    copy_rows<BLOCK_N, HEAD_DIM>(smem.k, work.k_gmem, args.k_stride.seq, first_key, work.seq_k);
    copy_rows<BLOCK_N, HEAD_DIM>(smem.v, work.v_gmem, args.v_stride.seq, first_key, work.seq_k);
    __syncthreads();  // Q, K and V are visible to all threads

    // S = Q K^T
#pragma unroll
    for (int key = 0; key < BLOCK_N; key += WMMA_TILE) {
      Accumulator s;
      wmma::fill_fragment(s, 0.0f);
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
        A<T> q;
        B<T, wmma::col_major> k;  // column-major K^T [HEAD_DIM, BLOCK_N] is row-major K
        wmma::load_matrix_sync(q, &smem.q[warp_row][d], HEAD_DIM + PAD);
        wmma::load_matrix_sync(k, &smem.k[key][d], HEAD_DIM + PAD);
        wmma::mma_sync(s, q, k, s);
      }
      wmma::store_matrix_sync(&smem.s[warp_row][key], s, sizeof(smem.s[0]) / sizeof(float), wmma::mem_row_major);
    }
    __syncwarp();  // S is visible to the warp

#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; ++r) {
      const int row = lane_row + r * ROWS_PER_PASS;
      const int limit = min(work.seq_k, work.diagonal + row) - first_key;

      // scale, mask, row max
      float s[BLOCK_N / COLUMNS][4];
      float m_new = m[r];
#pragma unroll
      for (int n = 0; n < BLOCK_N / COLUMNS; ++n) {
        const int column = n * COLUMNS + lane_column;
        *reinterpret_cast<float4*>(s[n]) = *reinterpret_cast<const float4*>(&smem.s[row][column]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = column + i < limit ? s[n][i] * scale_log2 : -CUDART_INF_F;
          m_new = fmaxf(m_new, s[n][i]);
        }
      }
      m_new = max_of_row(m_new);
      const float m_finite = m_new == -CUDART_INF_F ? 0.0f : m_new;  // no key seen yet: exp2(-inf - 0) = 0

      // rescale
      rescale[r] = exp2f(m[r] - m_finite);
      m[r] = m_new;
      l[r] *= rescale[r];

      // P = exp2(S - m), row sum
#pragma unroll
      for (int n = 0; n < BLOCK_N / COLUMNS; ++n) {
        alignas(8) T p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = exp2f(s[n][i] - m_finite);
          l[r] += s[n][i];
          p[i] = T(s[n][i]);
        }
        *reinterpret_cast<uint2*>(&smem.p[row][n * COLUMNS + lane_column]) = *reinterpret_cast<const uint2*>(p);
      }
    }
    __syncwarp();  // P is visible to the warp, and all lanes are done with S

    // O += P V
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
      Accumulator pv;
      wmma::fill_fragment(pv, 0.0f);
#pragma unroll
      for (int key = 0; key < BLOCK_N; key += WMMA_TILE) {
        A<T> p;
        B<T, wmma::row_major> v;
        wmma::load_matrix_sync(p, &smem.p[warp_row][key], BLOCK_N + PAD);
        wmma::load_matrix_sync(v, &smem.v[key][d], HEAD_DIM + PAD);
        wmma::mma_sync(pv, p, v, pv);
      }
      wmma::store_matrix_sync(&smem.s[warp_row][d], pv, sizeof(smem.s[0]) / sizeof(float), wmma::mem_row_major);
    }
    __syncwarp();  // P V is visible to the warp
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; ++r) {
#pragma unroll
      for (int d = 0; d < HEAD_DIM / COLUMNS; ++d) {
        const float4 pv = *reinterpret_cast<const float4*>(&smem.s[lane_row + r * ROWS_PER_PASS][d * COLUMNS + lane_column]);
        o[r][d][0] = o[r][d][0] * rescale[r] + pv.x;
        o[r][d][1] = o[r][d][1] * rescale[r] + pv.y;
        o[r][d][2] = o[r][d][2] * rescale[r] + pv.z;
        o[r][d][3] = o[r][d][3] * rescale[r] + pv.w;
      }
    }
  }

  // Normalise.  A row that sees no key is zero, and its log-sum-exp is -inf.
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < ROWS_PER_LANE; ++r) {
    const int query = work.first_query + lane_row + r * ROWS_PER_PASS;
    const float sum = sum_of_row(l[r]);
    const float inverse_l = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (query >= work.seq_q) continue;
    if (args.lse != nullptr && lane % LANES_PER_ROW == 0) {
      lse_gmem[query] = sum == 0.0f ? -CUDART_INF_F : (m[r] + log2f(sum)) * CUDART_LN2_F;
    }

    // Store, 8 bytes at a time.
#pragma unroll
    for (int d = 0; d < HEAD_DIM / COLUMNS; ++d) {
      alignas(8) T rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rounded[i] = T(o[r][d][i] * inverse_l);
      T* to_gmem = out_gmem + query * args.out_stride.seq + d * COLUMNS + lane_column;
      *reinterpret_cast<uint2*>(to_gmem) = *reinterpret_cast<const uint2*>(rounded);
    }
  }
}

// Whether every row of a tensor can be accessed with aligned 16-byte copies.
bool is_vector_aligned(const void* data, const FaStrides& stride) {
  // The bitwise OR of the strides is divisible by a power of two if and only if every stride is.
  const int64_t strides_or = stride.batch | stride.head | stride.seq;
  return stride.dim == 1 && strides_or % VECTOR == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  const bool aligned = is_vector_aligned(args->q, args->q_stride) && is_vector_aligned(args->k, args->k_stride) &&
                       is_vector_aligned(args->v, args->v_stride) && is_vector_aligned(args->out, args->out_stride);
  if (!aligned) return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of 16 bytes");
  const int64_t blocks_per_head = (args->seq_q + BLOCK_M - 1) / BLOCK_M;
  if (args->heads > INT32_MAX || args->batch > UINT16_MAX || blocks_per_head > UINT16_MAX || args->seq_k > INT32_MAX / 2) {
    return fa_refuse(args, "the shape is too large: batch %lld (at most %d), heads %lld (at most %d), seq_q %lld (at most %d), "
                           "seq_k %lld (below 2^30)",
                     static_cast<long long>(args->batch), UINT16_MAX, static_cast<long long>(args->heads), INT32_MAX,
                     static_cast<long long>(args->seq_q), UINT16_MAX * BLOCK_M, static_cast<long long>(args->seq_k));
  }
  auto* kernel = &wmma_kernel<T, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  const dim3 grid(static_cast<unsigned>(args->heads), static_cast<unsigned>(blocks_per_head), static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads));
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
