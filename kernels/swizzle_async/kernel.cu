// swizzle_async: cp.async copies K and V into a ring of swizzled tiles; the scale is folded into the argument of exp2.
// step:    cp.async into STAGES swizzled tiles, one barrier per tile, Q in registers, one fused multiply-add before each
//          exp2
// because: mma_regs waits for the loads of each tile, pads its rows, and spends two instructions per score on the scale
// expect:  9 to 12 us at the target shape (1x8x512x64); the loads of the next tile overlap with the mma of this tile
// tile:    BLOCK_M queries x BLOCK_N keys, 16 queries per warp; 40 KB of shared memory per block (D = 64), 80 KB (D = 128)
// takes:   fp16 and bf16, D = 64 and 128, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped
//          heads; rows contiguous and 16-byte aligned
#include <float.h>
#include <math_constants.h>

#include "fa/entry.h"
#include "fa/epilogue.cuh"
#include "fa/grid.h"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/softmax.cuh"
#include "fa/swizzle.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

using fa::MMA_K, fa::MMA_M, fa::MMA_N, fa::QUAD, fa::VECTOR, fa::WARP;

constexpr int WARPS = BLOCK_M / MMA_M;
constexpr int THREADS = WARPS * WARP;
constexpr int N_TILES = BLOCK_N / MMA_N;

static_assert(BLOCK_M % MMA_M == 0, "BLOCK_M must be a multiple of 16, because every warp owns 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "BLOCK_N must be a multiple of 16, because ldmatrix reads 16 keys at a time");
static_assert(STAGES >= 2, "STAGES must be at least 2, because one stage is read while another one is filled");

template <typename T, int HEAD_DIM>
struct Smem {
  alignas(128) T q[BLOCK_M * HEAD_DIM];
  T k[STAGES][BLOCK_N * HEAD_DIM];
  T v[STAGES][BLOCK_N * HEAD_DIM];
};

// Copies rows [first_row, first_row + ROWS) of a [seq, HEAD_DIM] tensor; rows from seq on are filled with zeros.
template <int ROWS, int HEAD_DIM, typename T>
__device__ void copy_rows(T* to_smem, const T* from_gmem, int64_t row_stride, int first_row, int seq) {
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += THREADS) {
    const int row = (i + threadIdx.x) / (HEAD_DIM / VECTOR), column = (i + threadIdx.x) % (HEAD_DIM / VECTOR) * VECTOR;
    if (ROWS * HEAD_DIM / VECTOR % THREADS != 0 && row >= ROWS) break;
    const T* elements_gmem = from_gmem + (first_row + row) * row_stride + column;
    fa::cp_async_16_or_zero(to_smem + fa::swizzle<HEAD_DIM>(row, column), elements_gmem, first_row + row < seq);
  }
}

// Load K and V of one tile into its stage, as one cp.async group.  Past the last tile the group is empty.
template <typename T, int HEAD_DIM>
__device__ void load_kv(Smem<T, HEAD_DIM>& smem, const fa::WorkTile<T>& work, const FaForwardArgs& args, int key_tile) {
  const int stage = key_tile % STAGES, first_key = key_tile * BLOCK_N;
  if (key_tile < work.key_tiles) {
    copy_rows<BLOCK_N, HEAD_DIM>(smem.k[stage], work.k_gmem, args.k_stride.seq, first_key, work.seq_k);
    copy_rows<BLOCK_N, HEAD_DIM>(smem.v[stage], work.v_gmem, args.v_stride.seq, first_key, work.seq_k);
  }
  fa::cp_async_commit_group();
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) swizzle_async_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T, HEAD_DIM>& smem = *reinterpret_cast<Smem<T, HEAD_DIM>*>(smem_bytes);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const fa::WorkTile<T> work = fa::make_work_tile<T, BLOCK_M, BLOCK_N>(args, heads_per_kv_head);
  const int lane_row = warp * MMA_M + lane / QUAD;  // this lane holds rows lane_row and lane_row + 8 of S, P and O
  // exp(scale s) = 2^(scale_log2 s).  The sign of the scale is applied to Q, so the largest score can be found before scaling.
  // A scale of zero becomes FLT_MIN: all keys still get equal weights, and -inf * scale stays -inf.
  const float scale_log2 = args.scale == 0.0f ? FLT_MIN : fabsf(args.scale) * CUDART_L2E_F;
  const uint32_t q_sign_bits = args.scale < 0.0f ? 0x80008000u : 0u;

  // Load Q, then the first STAGES - 1 tiles of K and V.
  copy_rows<BLOCK_M, HEAD_DIM>(smem.q, work.q_gmem, args.q_stride.seq, work.first_query, work.seq_q);
  fa::cp_async_commit_group();
#pragma unroll
  for (int key_tile = 0; key_tile < STAGES - 1; ++key_tile) load_kv<T, HEAD_DIM>(smem, work, args, key_tile);
  fa::cp_async_wait_group<STAGES - 1>();
  __syncthreads();  // Q is visible to all threads
  uint32_t q[HEAD_DIM / MMA_K][4];
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += MMA_K) {
    uint32_t(&fragment)[4] = q[d / MMA_K];
    fa::ldmatrix_x4(fragment, fa::smem_address(smem.q + fa::swizzle<HEAD_DIM>(warp * MMA_M + lane % 16, d + lane / 16 * 8)));
    for (uint32_t& pair : fragment) pair ^= q_sign_bits;
  }

  float o[HEAD_DIM / MMA_N][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // running row max of the unscaled scores
  float l[2] = {};                              // this lane's part of the running row sum

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V: wait for those of this tile, and issue the loads of a later one.
    fa::cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // K and V are visible to all threads, and the stage of the previous tile is free
    load_kv<T, HEAD_DIM>(smem, work, args, key_tile + STAGES - 1);
    const T* k_smem = smem.k[key_tile % STAGES];
    const T* v_smem = smem.v[key_tile % STAGES];

    // S = Q K^T
    float s[N_TILES][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        uint32_t k[4];  // B fragments of 16 keys: 0 and 1 for the first mma, 2 and 3 for the second
        const int key = n * MMA_N + lane / 16 * 8 + lane % 8;
        fa::ldmatrix_x4(k, fa::smem_address(k_smem + fa::swizzle<HEAD_DIM>(key, d + lane / 8 % 2 * 8)));
        fa::mma_m16n8k16<T>(s[n], q[d / MMA_K], k[0], k[1]);
        fa::mma_m16n8k16<T>(s[n + 1], q[d / MMA_K], k[2], k[3]);
      }
    }

    // mask; only tiles that cross the diagonal or the last key need it
    if (first_key + BLOCK_N > min(work.seq_k, work.diagonal)) {
      fa::mask(s, work.seq_k, work.diagonal + lane_row, first_key, lane);
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // row max
      const float m_new = fa::max_of_row(s, r, m[r]);
      const float m_log2 = m_new == -CUDART_INF_F ? 0.0f : m_new * scale_log2;  // no key seen yet: exp2(-inf - 0) = 0

      // rescale
      const float rescale = fa::ex2_approx_ftz(m[r] * scale_log2 - m_log2);
      m[r] = m_new;
      l[r] *= rescale;
      fa::scale_row(o, r, rescale);

      // P = exp2(S - m), row sum
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        s[n][2 * r] = fa::ex2_approx_ftz(s[n][2 * r] * scale_log2 - m_log2);
        s[n][2 * r + 1] = fa::ex2_approx_ftz(s[n][2 * r + 1] * scale_log2 - m_log2);
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
        const int key = n * MMA_N + lane % 16;
        fa::ldmatrix_x4_trans(v, fa::smem_address(v_smem + fa::swizzle<HEAD_DIM>(key, d * MMA_N + lane / 16 * 8)));
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
    fa::scale_row(o, r, fa::inverse_of(sum));
    if (args.lse != nullptr && lane % QUAD == 0 && query < work.seq_q) lse_gmem[query] = fa::lse_of(m[r], scale_log2, sum);

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
  if (int status = fa::make_grid(args, BLOCK_M, VECTOR, &grid)) return status;
  constexpr auto kernel = &swizzle_async_kernel<T, HEAD_DIM>;
  constexpr int smem_bytes = sizeof(Smem<T, HEAD_DIM>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  kernel<<<grid, THREADS, smem_bytes, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)
