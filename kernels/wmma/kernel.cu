// wmma: tensor cores through nvcuda::wmma; a warp's scores, and what it adds to O, go through shared memory.
// step:    S = Q K^T and P V by 16x16x16 tensor-core products in place of multiply-adds; 16 rows per warp at once
// because: light_barriers does 2 x 64 multiply-adds per score on FP32 units, a sixteenth of what tensor cores do
// expect:  ten to twenty times faster than light_barriers; S, P and P V through shared memory are most of what is left
// diff:    large, since rows, fragments and tiles take the place of single products; 128 dimensions come for nothing
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 54 KB of shared memory per block (D = 64), 94 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, both causal corners, grouped heads; rows contiguous
//          and 16-byte aligned
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
constexpr int PAD = 8;                 // 16 bytes past a row move the next one by four banks
constexpr int WARPS = BLOCK_M / WMMA_TILE;
constexpr int THREADS = WARPS * WARP;
constexpr int LANES_PER_ROW = 8;       // of S and O: 8 lanes x 16 bytes read 128 bytes in a row, which no two banks share
constexpr int COLUMNS = LANES_PER_ROW * 4;
constexpr int ROWS_PER_PASS = WARP / LANES_PER_ROW;
constexpr int ROWS_PER_LANE = WMMA_TILE / ROWS_PER_PASS;

static_assert(BLOCK_M % WMMA_TILE == 0, "every warp owns 16 queries");
static_assert(BLOCK_N % COLUMNS == 0, "every lane owns as many scores of a row");

template <typename T, int HEAD_DIM>
struct Smem {
  alignas(16) T q[BLOCK_M][HEAD_DIM + PAD];
  T k[BLOCK_N][HEAD_DIM + PAD];
  T v[BLOCK_N][HEAD_DIM + PAD];
  T p[BLOCK_M][BLOCK_N + PAD];
  alignas(32) float s[BLOCK_M][(BLOCK_N > HEAD_DIM ? BLOCK_N : HEAD_DIM) + PAD];  // S, then what the tile adds to O
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
  const Block<T> block = find_block<T>(args, heads_per_kv_head);
  const int strip = warp * WMMA_TILE;                    // the first of this warp's rows of S, P and O
  const int first_row = strip + lane / LANES_PER_ROW;    // the first of this lane's: every fourth
  const int first_column = lane % LANES_PER_ROW * 4;     // and four columns in every COLUMNS
  const float scale_log2 = args.scale * CUDART_L2E_F;  // exp(x) = 2^(x log2 e)

  // Load Q.
  copy_rows<BLOCK_M, HEAD_DIM>(smem.q, block.q_gmem, args.q_stride.seq, block.first_query, block.seq_q);

  float o[ROWS_PER_LANE][HEAD_DIM / COLUMNS][4] = {};
  float m[ROWS_PER_LANE];       // running row max, in log2
  float l[ROWS_PER_LANE] = {};  // this lane's part of the running row sum
  float rescale[ROWS_PER_LANE];
  for (float& each : m) each = -CUDART_INF_F;

  for (int tile = 0; tile < block.tiles; ++tile) {
    const int first_key = tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // everyone has left the last tile
    copy_rows<BLOCK_N, HEAD_DIM>(smem.k, block.k_gmem, args.k_stride.seq, first_key, block.seq_k);
    copy_rows<BLOCK_N, HEAD_DIM>(smem.v, block.v_gmem, args.v_stride.seq, first_key, block.seq_k);
    __syncthreads();  // Q, K and V are there for everyone

    // S = Q K^T
#pragma unroll
    for (int key = 0; key < BLOCK_N; key += WMMA_TILE) {
      Accumulator s;
      wmma::fill_fragment(s, 0.0f);
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
        A<T> q;
        B<T, wmma::col_major> k;  // K^T: [HEAD_DIM, BLOCK_N] lies as K's rows
        wmma::load_matrix_sync(q, &smem.q[strip][d], HEAD_DIM + PAD);
        wmma::load_matrix_sync(k, &smem.k[key][d], HEAD_DIM + PAD);
        wmma::mma_sync(s, q, k, s);
      }
      wmma::store_matrix_sync(&smem.s[strip][key], s, sizeof(smem.s[0]) / sizeof(float), wmma::mem_row_major);
    }
    __syncwarp();  // S is there for the warp

#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; ++r) {
      const int row = first_row + r * ROWS_PER_PASS;
      const int limit = min(block.seq_k, block.diagonal + row) - first_key;

      // scale, mask, row max
      float s[BLOCK_N / COLUMNS][4];
      float m_new = m[r];
#pragma unroll
      for (int n = 0; n < BLOCK_N / COLUMNS; ++n) {
        const int column = n * COLUMNS + first_column;
        *reinterpret_cast<float4*>(s[n]) = *reinterpret_cast<const float4*>(&smem.s[row][column]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = column + i < limit ? s[n][i] * scale_log2 : -CUDART_INF_F;
          m_new = fmaxf(m_new, s[n][i]);
        }
      }
      m_new = max_of_row(m_new);
      const float m_finite = m_new == -CUDART_INF_F ? 0.0f : m_new;  // a row that has seen no key yet: 2^(-inf - 0) = 0

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
        *reinterpret_cast<uint2*>(&smem.p[row][n * COLUMNS + first_column]) = *reinterpret_cast<const uint2*>(p);
      }
    }
    __syncwarp();  // P is there for the warp, which has left S

    // O += P V
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
      Accumulator pv;
      wmma::fill_fragment(pv, 0.0f);
#pragma unroll
      for (int key = 0; key < BLOCK_N; key += WMMA_TILE) {
        A<T> p;
        B<T, wmma::row_major> v;
        wmma::load_matrix_sync(p, &smem.p[strip][key], BLOCK_N + PAD);
        wmma::load_matrix_sync(v, &smem.v[key][d], HEAD_DIM + PAD);
        wmma::mma_sync(pv, p, v, pv);
      }
      wmma::store_matrix_sync(&smem.s[strip][d], pv, sizeof(smem.s[0]) / sizeof(float), wmma::mem_row_major);
    }
    __syncwarp();  // P V is there for the warp
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; ++r) {
#pragma unroll
      for (int d = 0; d < HEAD_DIM / COLUMNS; ++d) {
        const float4 pv = *reinterpret_cast<const float4*>(&smem.s[first_row + r * ROWS_PER_PASS][d * COLUMNS + first_column]);
        o[r][d][0] = o[r][d][0] * rescale[r] + pv.x;
        o[r][d][1] = o[r][d][1] * rescale[r] + pv.y;
        o[r][d][2] = o[r][d][2] * rescale[r] + pv.z;
        o[r][d][3] = o[r][d][3] * rescale[r] + pv.w;
      }
    }
  }

  // Normalise; a row that sees no key is zero and its log-sum-exp is -inf.
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < ROWS_PER_LANE; ++r) {
    const int query = block.first_query + first_row + r * ROWS_PER_PASS;
    const float sum = sum_of_row(l[r]);
    const float inverse_l = sum > 0.0f ? 1.0f / sum : 0.0f;
    if (query >= block.seq_q) continue;
    if (args.lse != nullptr && lane % LANES_PER_ROW == 0) {
      lse_gmem[query] = sum > 0.0f ? (m[r] + log2f(sum)) * CUDART_LN2_F : -CUDART_INF_F;
    }

    // Store, in pieces of 8 bytes.
#pragma unroll
    for (int d = 0; d < HEAD_DIM / COLUMNS; ++d) {
      alignas(8) T rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rounded[i] = T(o[r][d][i] * inverse_l);
      T* to_gmem = out_gmem + query * args.out_stride.seq + d * COLUMNS + first_column;
      *reinterpret_cast<uint2*>(to_gmem) = *reinterpret_cast<const uint2*>(rounded);
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
  auto* kernel = &wmma_kernel<T, HEAD_DIM>;
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
