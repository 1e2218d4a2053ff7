// mma_regs: tensor cores through mma.sync; each warp keeps its rows of S, P and O in registers.
// step:    mma.sync m16n8k16 and ldmatrix instead of wmma; S and P stay in registers
// because: wmma does not define which lane holds which element, so S, P and P V all go through shared memory
// expect:  14 to 20 us at the target shape (1x8x512x64); only Q, K and V go through shared memory, and the only barriers
//          are those of the tiles
// diff:    large, because all steps through shared memory are gone; the remaining steps keep their order
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 27 KB of shared memory per block (D = 64), 51 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped
//          heads; rows contiguous and 16-byte aligned
#include <math_constants.h>

#include "fa/copy.cuh"
#include "fa/entry.h"
#include "fa/grid.h"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

using fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

constexpr int PAD = 8;                 // 16 bytes after each row shift the next row by four banks
constexpr int WARPS = BLOCK_M / MMA_M;
constexpr int THREADS = WARPS * WARP;
constexpr int N_TILES = BLOCK_N / MMA_N;

static_assert(BLOCK_M % MMA_M == 0, "BLOCK_M must be a multiple of 16, because every warp owns 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "BLOCK_N must be a multiple of 16, because ldmatrix reads 16 keys at a time");

template <typename T, int HEAD_DIM>
struct Smem {
  alignas(16) T q[BLOCK_M][HEAD_DIM + PAD];
  T k[BLOCK_N][HEAD_DIM + PAD];
  T v[BLOCK_N][HEAD_DIM + PAD];
};

// S += Q K^T for the 16 rows of a warp.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void multiply_qk(float (&s)[N_TILES][4], const Smem<T, HEAD_DIM>& smem, int warp, int lane) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += MMA_K) {
    uint32_t q[4];
    fa::ldmatrix_x4(q, fa::smem_address(&smem.q[warp * MMA_M + lane % 16][d + lane / 16 * 8]));
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      uint32_t k[4];  // B fragments of 16 keys: 0 and 1 for the first mma, 2 and 3 for the second
      fa::ldmatrix_x4(k, fa::smem_address(&smem.k[n * MMA_N + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]));
      fa::mma_m16n8k16<T>(s[n], q, k[0], k[1]);
      fa::mma_m16n8k16<T>(s[n + 1], q, k[2], k[3]);
    }
  }
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) mma_regs_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const fa::WorkTile<T> work = fa::make_work_tile<T, BLOCK_M, BLOCK_N>(args, heads_per_kv_head);
  const int lane_row = warp * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8 of S, P and O
  const float scale_log2 = args.scale * CUDART_L2E_F;  // exp(x) = 2^(x log2 e)

  // Load Q.
  fa::copy_rows<BLOCK_M, HEAD_DIM, THREADS>(smem.q, work.q_gmem, args.q_stride.seq, work.first_query, work.seq_q);

  float o[HEAD_DIM / MMA_N][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // running row max, in log2
  float l[2] = {};                              // this lane's part of the running row sum

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // all threads are done with the previous tile
    fa::copy_rows<BLOCK_N, HEAD_DIM, THREADS>(smem.k, work.k_gmem, args.k_stride.seq, first_key, work.seq_k);
    fa::copy_rows<BLOCK_N, HEAD_DIM, THREADS>(smem.v, work.v_gmem, args.v_stride.seq, first_key, work.seq_k);
    __syncthreads();  // Q, K and V are visible to all threads

    // S = Q K^T
    float s[N_TILES][4] = {};
    multiply_qk<T, HEAD_DIM>(s, smem, warp, lane);

    // scale
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= scale_log2;
    }

    // mask; only tiles that cross the diagonal or the last key need it
    if (first_key + BLOCK_N > min(work.seq_k, work.diagonal)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int limit = min(work.seq_k, work.diagonal + lane_row + i / 2 * 8) - first_key;
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
      const float m_finite = m_new == -CUDART_INF_F ? 0.0f : m_new;  // no key seen yet: exp2(-inf - 0) = 0

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

    // O += P V; two adjacent accumulator fragments of S form one A fragment of P
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      const uint32_t p[4] = {fa::cvt_rn_x2<T>(s[n][0], s[n][1]), fa::cvt_rn_x2<T>(s[n][2], s[n][3]),
                             fa::cvt_rn_x2<T>(s[n + 1][0], s[n + 1][1]), fa::cvt_rn_x2<T>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
      for (int d = 0; d < HEAD_DIM / MMA_N; d += 2) {
        uint32_t v[4];  // B fragments of 16 dimensions: 0 and 1 for the first mma, 2 and 3 for the second
        fa::ldmatrix_x4_trans(v, fa::smem_address(&smem.v[n * MMA_N + lane % 16][d * MMA_N + lane / 16 * 8]));
        fa::mma_m16n8k16<T>(o[d], p, v[0], v[1]);
        fa::mma_m16n8k16<T>(o[d + 1], p, v[2], v[3]);
      }
    }
  }

  // Normalise.  A row that sees no key is zero, and its log-sum-exp is -inf.
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = work.first_query + lane_row + r * 8;
    const float sum = fa::sum_of_quad(l[r]);
    const float inverse_l = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
      o[d][2 * r] *= inverse_l;
      o[d][2 * r + 1] *= inverse_l;
    }
    if (args.lse != nullptr && lane % QUAD == 0 && query < work.seq_q) {
      lse_gmem[query] = sum == 0.0f ? -CUDART_INF_F : (m[r] + log2f(sum)) * CUDART_LN2_F;
    }

    // Store.  The lanes of a quad exchange registers, so that each lane stores 16 contiguous bytes.
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; d += QUAD) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < QUAD; ++i) packed[i] = fa::cvt_rn_x2<T>(o[d + i][2 * r], o[d + i][2 * r + 1]);
      fa::transpose_quad(packed, lane);
      if (query >= work.seq_q) continue;
      T* to_gmem = out_gmem + query * args.out_stride.seq + (d + lane % QUAD) * MMA_N;
      *reinterpret_cast<uint4*>(to_gmem) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  dim3 grid;
  if (int status = fa::make_grid(args, BLOCK_M, fa::VECTOR, &grid)) return status;
  constexpr auto kernel = &mma_regs_kernel<T, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  kernel<<<grid, THREADS, smem_bytes, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)
