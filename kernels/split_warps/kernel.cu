// split_warps: the keys are split over groups of warps, each with its own ring; O is merged in shared memory.
// step:    KEY_GROUPS groups of warps share the queries and split the keys, each with its own copies; one merge at the end
// because: swizzle_async has 4 warps on 64 of 132 SMs, and each of its 8 tiles waits for the one before
// expect:  4.5 to 6.5 us at the mission shape; the groups' loads are in flight at once and nobody waits for another group
// diff:    large: any rows per warp, groups with their own barriers, the merge, and parameters in two cache lines (fa/params.cuh)
// tile:    BLOCK_M queries x BLOCK_N keys per group, WARP_ROWS queries per warp; 69 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, both causal corners, grouped heads; rows contiguous and
//          16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/params.cuh"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of a fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes
constexpr int M_TILES = WARP_ROWS / MMA_M;
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int D_TILES_PER_GROUP = D_TILES / KEY_GROUPS;  // of the merged O
constexpr int ROWS = 2 * M_TILES;                        // of a lane: every eighth of its warp's
constexpr int PIECES = ROWS * D_TILES_PER_GROUP;         // of a lane after the merge: 2 neighbours in a row, row by row
constexpr int GROUP_THREADS = BLOCK_M / WARP_ROWS * WARP;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;  // P may grow to 2^8 before O is rescaled: fp16 holds 2^15, and its precision is relative

static_assert(BLOCK_M % WARP_ROWS == 0 && WARP_ROWS % MMA_M == 0, "every warp owns whole fragments of queries");
static_assert(BLOCK_N % MMA_K == 0, "ldmatrix takes 16 keys at a time");
static_assert(D_TILES % KEY_GROUPS == 0, "every group merges as many columns of O");
static_assert(KEY_GROUPS <= 15, "a named barrier for every group");

// The merge: what a group found for the columns that another group will store, one float4 per fragment and lane.
using Partial = float4[KEY_GROUPS][M_TILES][D_TILES_PER_GROUP][GROUP_THREADS];

template <typename T>
struct Ring {
  T k[STAGES][BLOCK_N * HEAD_DIM];
  T v[STAGES][BLOCK_N * HEAD_DIM];
};

template <typename T>
struct Smem {
  alignas(128) T q[BLOCK_M * HEAD_DIM];
  union {
    Ring<T> ring;
    Partial o;
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];  // row max, before the scale
  float l[KEY_GROUPS][BLOCK_M];  // row sum
};

// What one block works on: BLOCK_M queries of one head.
struct Block {
  const uint4* q_gmem;  // [seq_q, HEAD_DIM / VECTOR], in steps of q_strides.row
  const uint4* k_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  const uint4* v_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int tiles;     // of keys that any of these queries sees
};

__device__ __forceinline__ Block find_block(const fa::Params& params) {
  const uint32_t head = blockIdx.x, batch = blockIdx.z, kv_head = fa::kv_head_of(params, head);
  const int first_query = blockIdx.y * BLOCK_M;
  const int diagonal = params.first_diagonal + first_query;
  const int keys = max(0, min(params.seq_k, diagonal + BLOCK_M - 1));
  return {
      params.q + (uint64_t(batch) * params.q_strides.batch + uint64_t(head) * params.q_strides.head),
      params.k + (uint64_t(batch) * params.k_strides.batch + uint64_t(kv_head) * params.k_strides.head),
      params.v + (uint64_t(batch) * params.v_strides.batch + uint64_t(kv_head) * params.v_strides.head),
      first_query,
      diagonal,
      (keys + BLOCK_N - 1) / BLOCK_N,
  };
}

// Copy rows [first, first + ROWS) of [seq, HEAD_DIM], zeros past the end, by LOADERS threads of which this is number `loader`.
template <int ROWS, int LOADERS, typename T>
__device__ __forceinline__ void copy_rows(
    T* to_smem, const uint4* from_gmem, uint32_t row_step, uint32_t first, uint32_t seq, uint32_t loader) {
  const uint32_t first_row = loader / (HEAD_DIM / VECTOR), column = loader % (HEAD_DIM / VECTOR);
  from_gmem += uint64_t(first + first_row) * row_step + column;
#pragma unroll
  for (int i = 0; i < ROWS * HEAD_DIM / VECTOR; i += LOADERS) {
    const uint32_t row = first_row + i / (HEAD_DIM / VECTOR);
    if (ROWS * HEAD_DIM / VECTOR % LOADERS != 0 && row >= ROWS) break;
    fa::cp_async_16_or_zero(to_smem + fa::swizzle<HEAD_DIM>(row, column * VECTOR), from_gmem, first + row < seq);
    from_gmem += uint64_t(LOADERS / (HEAD_DIM / VECTOR)) * row_step;
  }
}

// Load K or V of a group's tile, a cp.async group; past the last tile it is empty.
template <typename T>
__device__ __forceinline__ void load_tile(
    T* to_smem, const uint4* from_gmem, uint32_t row_step, int tile, int tiles, int seq_k, uint32_t loader) {
  if (tile < tiles) copy_rows<BLOCK_N, GROUP_THREADS>(to_smem, from_gmem, row_step, tile * BLOCK_N, seq_k, loader);
  fa::cp_async_commit_group();
}

template <typename T>
__global__ void __launch_bounds__(THREADS) split_warps_kernel(const fa::Params params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, loader = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const Block block = find_block(params);
  Ring<T>& ring = smem.group[group].ring;
  const int warp_row = loader / WARP * WARP_ROWS;  // the first of this warp's rows
  const int first_row = warp_row + lane / QUAD;    // the first of this lane's rows of S, P and O: every eighth
  const float scale_log2 = fa::scale_log2_of(params);
  // Load Q, and the first tiles behind it.
  copy_rows<BLOCK_M, THREADS>(smem.q, block.q_gmem, params.q_strides.row, block.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    const int tile = group + stage * KEY_GROUPS;
    load_tile(ring.k[stage], block.k_gmem, params.k_strides.row, tile, block.tiles, params.seq_k, loader);
    load_tile(ring.v[stage], block.v_gmem, params.v_strides.row, tile, block.tiles, params.seq_k, loader);
  }

  fa::cp_async_wait_group<2 * STAGES>();
  __syncthreads();  // Q is there for everyone
  uint32_t q[M_TILES][HEAD_DIM / MMA_K][4];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
      uint32_t(&q_of_d)[4] = q[t][d / MMA_K];
      const int row = warp_row + t * MMA_M + lane % 16;
      fa::ldmatrix_x4(q_of_d, fa::smem_address(smem.q + fa::swizzle<HEAD_DIM>(row, d + lane / 16 * 8)));
      for (uint32_t& each : q_of_d) each ^= fa::q_sign_bits(params);
    }
  }

  float o[M_TILES][D_TILES][4] = {};
  float m[M_TILES][2];       // row max that P is relative to, before the scale
  float l[M_TILES][2] = {};  // this lane's part of the running row sum
  for (auto& each : m) each[0] = each[1] = -CUDART_INF_F;

  for (int i = 0, tile = group; tile < block.tiles; ++i, tile += KEY_GROUPS) {
    const int first_key = tile * BLOCK_N;
    T* k_smem = ring.k[i % STAGES];
    T* v_smem = ring.v[i % STAGES];
    const int next_tile = tile + STAGES * KEY_GROUPS;  // that comes to this one's place

    // Load K and V: this tile's are on their way.
    fa::cp_async_wait_group<2 * STAGES - 1>();
    fa::barrier_sync<GROUP_THREADS>(1 + group);  // K is there for the group

    // S = Q K^T
    float s[M_TILES][N_TILES][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        uint32_t k[4];  // of 16 keys: two for the first mma, two for the second
        const int key = n * MMA_N + lane / 16 * 8 + lane % 8;
        fa::ldmatrix_x4(k, fa::smem_address(k_smem + fa::swizzle<HEAD_DIM>(key, d + lane / 8 % 2 * 8)));
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
          fa::mma_m16n8k16<T>(s[t][n], q[t][d / MMA_K], k[0], k[1]);
          fa::mma_m16n8k16<T>(s[t][n + 1], q[t][d / MMA_K], k[2], k[3]);
        }
      }
    }

    // Load the next K.
    if (next_tile < block.tiles) fa::barrier_sync<GROUP_THREADS>(1 + group);  // the group has left K
    load_tile(k_smem, block.k_gmem, params.k_strides.row, next_tile, block.tiles, params.seq_k, loader);

    // mask; the tile's first keys are seen by every query of the block
    if (first_key + BLOCK_N > min(params.seq_k, block.diagonal)) {
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int limit = min(params.seq_k, block.diagonal + first_row + t * MMA_M + i / 2 * 8) - first_key;
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) {
            if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[t][n][i] = -CUDART_INF_F;
          }
        }
      }
    }

    // row max
    float m_new[M_TILES][2];
    bool rises = false;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        m_new[t][r] = m[t][r];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) m_new[t][r] = fmaxf(m_new[t][r], fmaxf(s[t][n][2 * r], s[t][n][2 * r + 1]));
        m_new[t][r] = fa::max_of_quad(m_new[t][r]);
        rises |= (m_new[t][r] - m[t][r]) * scale_log2 > RESCALE_THRESHOLD_LOG2;  // from -inf it does, -inf itself gives NaN: it does not
      }
    }

    // rescale, where a row of the warp needs it
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float m_log2 = m_new[t][r] == -CUDART_INF_F ? 0.0f : m_new[t][r] * scale_log2;
          const float rescale = fa::ex2_approx_ftz(m[t][r] * scale_log2 - m_log2);
          m[t][r] = m_new[t][r];
          l[t][r] *= rescale;
#pragma unroll
          for (int d = 0; d < D_TILES; ++d) {
            o[t][d][2 * r] *= rescale;
            o[t][d][2 * r + 1] *= rescale;
          }
        }
      }
    }

    float m_log2[M_TILES][2];
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) m_log2[t][r] = m[t][r] == -CUDART_INF_F ? 0.0f : m[t][r] * scale_log2;  // 2^(-inf - 0) = 0
    }
    fa::cp_async_wait_group<2 * STAGES - 1>();
    fa::barrier_sync<GROUP_THREADS>(1 + group);  // V is there for the group
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two neighbouring fragments of S are one of P
      uint32_t p[M_TILES][4];
#pragma unroll
      for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i % 2;
          const float p0 = fa::ex2_approx_ftz(s[t][n + i / 2][2 * r] * scale_log2 - m_log2[t][r]);
          const float p1 = fa::ex2_approx_ftz(s[t][n + i / 2][2 * r + 1] * scale_log2 - m_log2[t][r]);
          l[t][r] += p0 + p1;
          p[t][i] = fa::cvt_rn_x2<T>(p0, p1);
        }
      }

      // O += P V, while the next P is being computed
#pragma unroll
      for (int d = 0; d < D_TILES; d += 2) {
        uint32_t v[4];  // of 16 dimensions: two for the first mma, two for the second
        const int key = n * MMA_N + lane % 16;
        fa::ldmatrix_x4_trans(v, fa::smem_address(v_smem + fa::swizzle<HEAD_DIM>(key, d * MMA_N + lane / 16 * 8)));
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
          fa::mma_m16n8k16<T>(o[t][d], p[t], v[0], v[1]);
          fa::mma_m16n8k16<T>(o[t][d + 1], p[t], v[2], v[3]);
        }
      }
    }

    // Load the next V.
    if (next_tile < block.tiles) fa::barrier_sync<GROUP_THREADS>(1 + group);  // the group has left V
    load_tile(v_smem, block.v_gmem, params.v_strides.row, next_tile, block.tiles, params.seq_k, loader);
  }

  // Merge: each group gets some columns of O from all others; what it gives them goes where its ring was.
  fa::barrier_sync<GROUP_THREADS>(1 + group);  // the group has left its ring
  Partial& given = smem.group[group].o;
  float4 kept[M_TILES][D_TILES_PER_GROUP];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < D_TILES; ++d) {
      const float4 part = make_float4(o[t][d][0], o[t][d][1], o[t][d][2], o[t][d][3]);
      if (d / D_TILES_PER_GROUP == group) {
        kept[t][d % D_TILES_PER_GROUP] = part;
      } else {
        given[d / D_TILES_PER_GROUP][t][d % D_TILES_PER_GROUP][loader] = part;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[t][r] = fa::sum_of_quad(l[t][r]);
      if (lane % QUAD != 0) continue;
      smem.m[group][first_row + (2 * t + r) * 8] = m[t][r];
      smem.l[group][first_row + (2 * t + r) * 8] = l[t][r];
    }
  }
  __syncthreads();  // every group's O, m and l are there for everyone

  float2 piece[PIECES];
  float m_log2[ROWS], sum[ROWS];
#pragma unroll
  for (int t = 0; t < M_TILES; ++t) {
    float weight[KEY_GROUPS][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * t + r;
      float m_all = -CUDART_INF_F;
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) m_all = fmaxf(m_all, smem.m[g][first_row + row * 8]);
      m_log2[row] = m_all == -CUDART_INF_F ? 0.0f : m_all * scale_log2;
      sum[row] = 0.0f;
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) {
        weight[g][r] = fa::ex2_approx_ftz(smem.m[g][first_row + row * 8] * scale_log2 - m_log2[row]);
        sum[row] += smem.l[g][first_row + row * 8] * weight[g][r];
      }
    }
#pragma unroll
    for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
      float2 merged[2] = {};
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) {
        const float4 part = g == group ? kept[t][d] : smem.group[g].o[group][t][d][loader];
        merged[0].x += part.x * weight[g][0];
        merged[0].y += part.y * weight[g][0];
        merged[1].x += part.z * weight[g][1];
        merged[1].y += part.w * weight[g][1];
      }
      piece[(2 * t + 0) * D_TILES_PER_GROUP + d] = merged[0];
      piece[(2 * t + 1) * D_TILES_PER_GROUP + d] = merged[1];
    }
  }

  // Normalise; a row that sees no key is zero and its log-sum-exp is -inf.
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const int query = block.first_query + first_row + row * 8;
    const float inverse_l = sum[row] > 0.0f ? 1.0f / sum[row] : 0.0f;
#pragma unroll
    for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
      piece[row * D_TILES_PER_GROUP + d].x *= inverse_l;
      piece[row * D_TILES_PER_GROUP + d].y *= inverse_l;
    }
    if (params.lse != nullptr && group == 0 && lane % QUAD == 0 && query < params.seq_q) {
      float* lse_gmem = params.lse + (uint64_t(blockIdx.z) * params.heads + blockIdx.x) * params.seq_q;
      lse_gmem[query] = sum[row] > 0.0f ? (m_log2[row] + log2f(sum[row])) * CUDART_LN2_F : -CUDART_INF_F;
    }
  }

  // Store: the lanes of a quad trade pieces, so that each has 16 bytes in a row.
  uint4* out_gmem = params.out + (uint64_t(blockIdx.z) * params.out_strides.batch + uint64_t(blockIdx.x) * params.out_strides.head);
  static_assert(PIECES % QUAD == 0, "the lanes of a quad store as many pieces");
#pragma unroll
  for (int i = 0; i < PIECES; i += QUAD) {
    uint32_t rounded[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; ++j) rounded[j] = fa::cvt_rn_x2<T>(piece[i + j].x, piece[i + j].y);
    fa::transpose_quad(rounded, lane);
    const int mine = i + lane % QUAD;
    const int query = block.first_query + first_row + mine / D_TILES_PER_GROUP * 8;
    if (query >= params.seq_q) continue;
    const uint32_t column = group * D_TILES_PER_GROUP + mine % D_TILES_PER_GROUP;
    out_gmem[uint64_t(query) * params.out_strides.row + column] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
  }
}

template <typename T>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, BLOCK_M, 1, &params)) return status;
  auto* kernel = &split_warps_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  const dim3 grid(params.heads, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(params);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM_) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) return launch<DTYPE>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}
