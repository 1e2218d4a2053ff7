// lazy_rescale: O is rescaled only where it must be, and P V runs between the exponentials.
// step:    O is rescaled only where P would exceed 2^8; P of 16 keys is computed just before its P V; kernel parameters in two
//          cache lines, with 32-bit strides in units of 16 bytes
// because: swizzle_async multiplies all of O for every tile, computes all of P before the first P V, and computes a 64-bit address
//          for every copy
// expect:  a tenth less time than swizzle_async at the target shape (1x8x512x64)
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 40 KB of shared memory per block (D = 64), 80 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped
//          heads; rows contiguous and 16-byte aligned
#include <math_constants.h>

#include "fa/copy.cuh"
#include "fa/entry.h"
#include "fa/epilogue.cuh"
#include "fa/launch.h"
#include "fa/mma.cuh"
#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/softmax.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

using fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::WARP;

constexpr int WARPS = BLOCK_M / MMA_M;
constexpr int THREADS = WARPS * WARP;
constexpr int N_TILES = BLOCK_N / MMA_N;

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

static_assert(BLOCK_M % MMA_M == 0, "BLOCK_M must be a multiple of 16, because every warp owns 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "BLOCK_N must be a multiple of 16, because ldmatrix reads 16 keys at a time");
static_assert(STAGES >= 2, "STAGES must be at least 2, because one stage is read while another one is filled");

template <typename T, int HEAD_DIM>
struct Smem {
  alignas(128) T q[BLOCK_M * HEAD_DIM];
  T k[STAGES][BLOCK_N * HEAD_DIM];
  T v[STAGES][BLOCK_N * HEAD_DIM];
};

// Load K and V of one tile into its stage, as one cp.async group.  Past the last tile the group is empty.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load_kv(
    Smem<T, HEAD_DIM>& smem, const fa::WorkTile<uint4>& work, const fa::Params& params, int key_tile) {
  const int stage = key_tile % STAGES, first_key = key_tile * BLOCK_N;
  if (key_tile < work.key_tiles) {
    fa::copy_rows_async<BLOCK_N, HEAD_DIM, THREADS>(smem.k[stage], work.k_gmem, params.k_strides.row, first_key, params.seq_k, threadIdx.x);
    fa::copy_rows_async<BLOCK_N, HEAD_DIM, THREADS>(smem.v[stage], work.v_gmem, params.v_strides.row, first_key, params.seq_k, threadIdx.x);
  }
  fa::cp_async_commit_group();
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) lazy_rescale_kernel(const fa::Params params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const fa::WorkTile<uint4> work = fa::make_work_tile<BLOCK_M, BLOCK_N>(params, blockIdx.x);
  const int lane_row = warp * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8 of S, P and O
  const float scale_log2 = fa::scale_log2_of(params);

  // Load Q, then the first STAGES - 1 tiles of K and V.
  fa::copy_rows_async<BLOCK_M, HEAD_DIM, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
#pragma unroll
  for (int key_tile = 0; key_tile < STAGES - 1; ++key_tile) load_kv(smem, work, params, key_tile);
  fa::cp_async_wait_group<STAGES - 1>();
  __syncthreads();  // Q is visible to all threads
  uint32_t q[HEAD_DIM / MMA_K][4];
  fa::load_q(q, smem.q, warp * MMA_M, lane, fa::q_sign_bits(params));

  float o[HEAD_DIM / MMA_N][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[2] = {};                              // this lane's part of the running row sum

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V: wait for those of this tile, and issue the loads of a later one.
    fa::cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // K and V are visible to all threads, and the stage of the previous tile is free
    load_kv(smem, work, params, key_tile + STAGES - 1);
    const T* k_smem = smem.k[key_tile % STAGES];
    const T* v_smem = smem.v[key_tile % STAGES];

    // S = Q K^T
    float s[N_TILES][4] = {};
    fa::multiply_qk(s, q, k_smem, lane);

    // mask; only tiles that cross the diagonal or the last key need it
    if (first_key + BLOCK_N > min(params.seq_k, work.diagonal)) {
      fa::mask(s, params.seq_k, work.diagonal + lane_row, first_key, lane);
    }

    // row max
    float m_new[2];
    bool needs_rescale = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_new[r] = fa::max_of_row(s, r, m[r]);
      // If only m is -inf, the difference is inf and the comparison true.  If both are, it is NaN and the comparison false.
      needs_rescale |= (m_new[r] - m[r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;
    }

    // rescale, if any row of the warp needs it
    if (__any_sync(0xffffffffu, needs_rescale)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float rescale = fa::ex2_approx_ftz(m[r] * scale_log2 - fa::finite_log2(m_new[r], scale_log2));
        m[r] = m_new[r];
        l[r] *= rescale;
        fa::scale_row(o, r, rescale);
      }
    }

    const float m_log2[2] = {fa::finite_log2(m[0], scale_log2), fa::finite_log2(m[1], scale_log2)};
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
      uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2;
        const float p0 = fa::ex2_approx_ftz(s[n + i / 2][2 * r] * scale_log2 - m_log2[r]);
        const float p1 = fa::ex2_approx_ftz(s[n + i / 2][2 * r + 1] * scale_log2 - m_log2[r]);
        l[r] += p0 + p1;
        p[i] = fa::cvt_rn_x2<T>(p0, p1);
      }

      // O += P V, overlapping with the computation of the next P
      fa::multiply_pv(o, p, v_smem, n * MMA_N, lane);
    }
  }

  // Normalise and store.  A row that sees no key is zero, and its log-sum-exp is -inf.
  uint4* out_gmem = params.out + (uint64_t(blockIdx.z) * params.out_strides.batch + uint64_t(blockIdx.x) * params.out_strides.head);
  float* lse_gmem = params.lse + (uint64_t(blockIdx.z) * params.heads + blockIdx.x) * params.seq_q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = work.first_query + lane_row + r * 8;
    const float sum = fa::sum_of_quad(l[r]);
    fa::scale_row(o, r, fa::inverse_of(sum));
    if (params.lse != nullptr && lane % QUAD == 0 && query < params.seq_q) lse_gmem[query] = fa::lse_of(m[r], scale_log2, sum);
    fa::store_row<T>(out_gmem + uint64_t(query) * params.out_strides.row, o, r, lane, query < params.seq_q);
  }
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, BLOCK_M, 1, &params)) return status;
  constexpr auto kernel = &lazy_rescale_kernel<T, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  const dim3 grid(params.heads, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(params);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)
