// wmma: tensor cores through nvcuda::wmma; S, P and P V go through shared memory.
// step:    S = Q K^T and P V by 16x16x16 tensor-core products instead of multiply-adds; 16 rows per warp at once
// because: light_barriers does 2 x 64 multiply-adds per score on FP32 units, at a sixteenth of the rate of tensor cores
// expect:  ten to twenty times faster than light_barriers; moving S, P and P V through shared memory takes most of the
//          remaining time
// diff:    large, because the code now works on 16x16 fragments instead of single products; D = 128 needs no extra code
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 54 KB of shared memory per block (D = 64), 94 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped
//          heads; rows contiguous and 16-byte aligned
#include <math_constants.h>
#include <mma.h>

#include "fa/entry.h"
#include "fa/grid.h"
#include "fa/launch.h"
#include "fa/tile.cuh"

namespace wmma = nvcuda::wmma;
using fa::VECTOR, fa::WARP;

constexpr int WMMA_TILE = 16;          // wmma's M, N and K
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

// O = O * rescale + P V.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void add_pv(float (&o)[ROWS_PER_LANE][HEAD_DIM / COLUMNS][4], const float (&rescale)[ROWS_PER_LANE],
                                       const Smem<T, HEAD_DIM>& smem, int lane_row, int lane_column) {
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

// Stores this lane's columns of a row of O, 8 bytes at a time.
template <typename T, int VECTORS>
__device__ __forceinline__ void store_row(T* to_gmem, const float (&o)[VECTORS][4], float inverse_l) {
#pragma unroll
  for (int d = 0; d < VECTORS; ++d) {
    alignas(8) const T rounded[4] = {T(o[d][0] * inverse_l), T(o[d][1] * inverse_l), T(o[d][2] * inverse_l), T(o[d][3] * inverse_l)};
    *reinterpret_cast<uint2*>(to_gmem + d * COLUMNS) = *reinterpret_cast<const uint2*>(rounded);
  }
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) wmma_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const fa::WorkTile<T> work = fa::make_work_tile<T, BLOCK_M, BLOCK_N>(args, heads_per_kv_head);
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
    add_pv(o, rescale, smem, lane_row, lane_column);
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

    store_row(out_gmem + query * args.out_stride.seq + lane_column, o[r], inverse_l);
  }
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  dim3 grid;
  if (int status = fa::make_grid(args, BLOCK_M, VECTOR, &grid)) return status;
  constexpr auto kernel = &wmma_kernel<T, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  kernel<<<grid, THREADS, smem_bytes, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)
