// split_warps: groups of warps divide the keys, each with its own ring of tiles; O is merged in shared memory.
// step:    KEY_GROUPS groups of warps share the queries and divide the keys; each group copies its own tiles; one merge at
//          the end
// because: lazy_rescale has 4 warps on 64 of 132 SMs, and each of its 8 tiles waits for the previous one
// expect:  4.5 to 6.5 us at the target shape (1x8x512x64); all groups of warps load at once, and none waits for
//          another
// diff:    groups with their own barriers, separate waits for K and V, and the merge
// tile:    BLOCK_M queries x BLOCK_N keys per group, 16 queries per warp; 69 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, top-left and bottom-right causal masks, grouped heads; rows
//          contiguous and 16-byte aligned
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

constexpr int HEAD_DIM = 64;
constexpr int N_TILES = BLOCK_N / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int D_TILES_PER_GROUP = D_TILES / KEY_GROUPS;    // 8-column tiles of O that a group merges and stores
constexpr int LANE_ROWS = 2;                               // rows that a lane holds: r and r + 8
constexpr int LANE_PAIRS = LANE_ROWS * D_TILES_PER_GROUP;  // pairs of adjacent elements that a lane merges, row by row
constexpr int GROUP_THREADS = BLOCK_M / MMA_M * WARP;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;

static_assert(BLOCK_M % MMA_M == 0, "every warp must own 16 queries");
static_assert(BLOCK_N % MMA_K == 0, "BLOCK_N must be a multiple of 16, because ldmatrix reads 16 keys at a time");
static_assert(D_TILES % KEY_GROUPS == 0, "every group must merge the same number of columns of O");
static_assert(KEY_GROUPS <= 15, "every group needs a named barrier of its own");
static_assert(LANE_PAIRS % QUAD == 0, "the lanes of a quad must store the same number of pairs");

// The partial O of one group, indexed by the group that merges these columns; one float4 per fragment and lane.
using PartialO = float4[KEY_GROUPS][D_TILES_PER_GROUP][GROUP_THREADS];

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
    PartialO partial_o;
  } group[KEY_GROUPS];
  float m[KEY_GROUPS][BLOCK_M];  // O and l are sums of exp2(S - m)
  float l[KEY_GROUPS][BLOCK_M];  // row sum
};

// What a lane has merged: pairs of adjacent elements of O, row by row, m in log2, and l.
struct Merged {
  float2 o[LANE_PAIRS];
  float m_log2[LANE_ROWS], l[LANE_ROWS];
};

// Load K or V of one key tile of a group of warps, as one cp.async group.  Past the last tile the cp.async group is empty.
template <typename T>
__device__ __forceinline__ void load_tile(
    T* to_smem, const uint4* from_gmem, uint32_t row_stride, int key_tile, int key_tiles, int seq_k, uint32_t thread_in_group) {
  if (key_tile < key_tiles) {
    fa::copy_rows_async<BLOCK_N, HEAD_DIM, GROUP_THREADS>(to_smem, from_gmem, row_stride, key_tile * BLOCK_N, seq_k, thread_in_group);
  }
  fa::cp_async_commit_group();
}

// Hands the columns of O that other groups merge to them, through the memory of the ring, and m and l.  `own_o` are the others.
template <typename T>
__device__ __forceinline__ void store_partial(Smem<T>& smem, float4 (&own_o)[D_TILES_PER_GROUP], const float (&o)[D_TILES][4],
                                              const float (&m)[LANE_ROWS], float (&l)[LANE_ROWS], int group, int thread_in_group,
                                              int lane_row) {
#pragma unroll
  for (int d = 0; d < D_TILES; ++d) {
    const float4 partial = make_float4(o[d][0], o[d][1], o[d][2], o[d][3]);
    if (d / D_TILES_PER_GROUP == group) {
      own_o[d % D_TILES_PER_GROUP] = partial;
    } else {
      smem.group[group].partial_o[d / D_TILES_PER_GROUP][d % D_TILES_PER_GROUP][thread_in_group] = partial;
    }
  }
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    l[r] = fa::sum_of_quad(l[r]);
    if (thread_in_group % QUAD != 0) continue;
    smem.m[group][lane_row + r * 8] = m[r];
    smem.l[group][lane_row + r * 8] = l[r];
  }
}

// Merges the columns of this group.
template <typename T>
__device__ __forceinline__ Merged merge_groups(const Smem<T>& smem, const float4 (&own_o)[D_TILES_PER_GROUP], int group,
                                               int thread_in_group, int lane_row, float scale_log2) {
  Merged merged;
  float weight[KEY_GROUPS][LANE_ROWS];
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    float m_all = -CUDART_INF_F;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) m_all = fmaxf(m_all, smem.m[g][lane_row + r * 8]);
    merged.m_log2[r] = fa::finite_log2(m_all, scale_log2);
    merged.l[r] = 0.0f;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      weight[g][r] = fa::ex2_approx_ftz(smem.m[g][lane_row + r * 8] * scale_log2 - merged.m_log2[r]);
      merged.l[r] += smem.l[g][lane_row + r * 8] * weight[g][r];
    }
  }
#pragma unroll
  for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
    float2 rows[LANE_ROWS] = {};
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; ++g) {
      const float4 partial = g == group ? own_o[d] : smem.group[g].partial_o[group][d][thread_in_group];
      rows[0].x += partial.x * weight[g][0];
      rows[0].y += partial.y * weight[g][0];
      rows[1].x += partial.z * weight[g][1];
      rows[1].y += partial.w * weight[g][1];
    }
    merged.o[d] = rows[0];
    merged.o[D_TILES_PER_GROUP + d] = rows[1];
  }
  return merged;
}

// Normalises and stores the columns of this group.  A row that sees no key is zero, and its log-sum-exp is -inf.
template <typename T>
__device__ __forceinline__ void store(Merged& merged, const fa::Params& params, int first_row_query, int group, int lane) {
#pragma unroll
  for (int r = 0; r < LANE_ROWS; ++r) {
    const int query = first_row_query + r * 8;
    const float inverse_l = fa::inverse_of(merged.l[r]);
#pragma unroll
    for (int d = 0; d < D_TILES_PER_GROUP; ++d) {
      merged.o[r * D_TILES_PER_GROUP + d].x *= inverse_l;
      merged.o[r * D_TILES_PER_GROUP + d].y *= inverse_l;
    }
    if (params.lse != nullptr && group == 0 && lane % QUAD == 0 && query < params.seq_q) {
      float* lse_gmem = params.lse + (uint64_t(blockIdx.z) * params.heads + blockIdx.x) * params.seq_q;
      lse_gmem[query] = fa::lse_of(merged.m_log2[r], merged.l[r]);
    }
  }

  // The lanes of a quad exchange registers, so that each lane stores 16 contiguous bytes.
  uint4* out_gmem = params.out + (uint64_t(blockIdx.z) * params.out_strides.batch + uint64_t(blockIdx.x) * params.out_strides.head);
#pragma unroll
  for (int i = 0; i < LANE_PAIRS; i += QUAD) {
    uint32_t packed[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; ++j) packed[j] = fa::cvt_rn_x2<T>(merged.o[i + j].x, merged.o[i + j].y);
    fa::transpose_quad(packed, lane);
    const int pair = i + lane % QUAD;
    const int query = first_row_query + pair / D_TILES_PER_GROUP * 8;
    if (query >= params.seq_q) continue;
    const uint32_t column = group * D_TILES_PER_GROUP + pair % D_TILES_PER_GROUP;
    out_gmem[uint64_t(query) * params.out_strides.row + column] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) split_warps_kernel(const fa::Params params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, thread_in_group = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const fa::WorkTile<uint4> work = fa::make_work_tile<BLOCK_M, BLOCK_N>(params, blockIdx.x);
  Ring<T>& ring = smem.group[group].ring;
  const int warp_row = thread_in_group / WARP * MMA_M;  // first of the 16 rows of this warp
  const int lane_row = warp_row + lane / QUAD;          // this lane holds rows lane_row and lane_row + 8 of S, P and O
  const float scale_log2 = fa::scale_log2_of(params);

  // Load Q, then the first STAGES tiles of K and V of this group.
  fa::copy_rows_async<BLOCK_M, HEAD_DIM, THREADS>(smem.q, work.q_gmem, params.q_strides.row, work.first_query, params.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    const int key_tile = group + stage * KEY_GROUPS;
    load_tile(ring.k[stage], work.k_gmem, params.k_strides.row, key_tile, work.key_tiles, params.seq_k, thread_in_group);
    load_tile(ring.v[stage], work.v_gmem, params.v_strides.row, key_tile, work.key_tiles, params.seq_k, thread_in_group);
  }

  fa::cp_async_wait_group<2 * STAGES>();
  __syncthreads();  // Q is visible to all threads
  uint32_t q[HEAD_DIM / MMA_K][4];
  fa::load_q(q, smem.q, warp_row, lane, fa::q_sign_bits(params));

  float o[D_TILES][4] = {};
  float m[LANE_ROWS] = {-CUDART_INF_F, -CUDART_INF_F};  // unscaled row max at the last rescale
  float l[LANE_ROWS] = {};                              // this lane's part of the running row sum

  for (int i = 0, key_tile = group; key_tile < work.key_tiles; ++i, key_tile += KEY_GROUPS) {
    const int first_key = key_tile * BLOCK_N;
    T* k_smem = ring.k[i % STAGES];
    T* v_smem = ring.v[i % STAGES];
    const int next_tile = key_tile + STAGES * KEY_GROUPS;  // the tile that is loaded into the same stage

    // Load K and V: the copies of this tile are in flight.
    fa::cp_async_wait_group<2 * STAGES - 1>();
    fa::barrier_sync<GROUP_THREADS>(1 + group);  // K is visible to the group

    // S = Q K^T
    float s[N_TILES][4] = {};
    fa::multiply_qk(s, q, k_smem, lane);

    // Load the next K.
    if (next_tile < work.key_tiles) fa::barrier_sync<GROUP_THREADS>(1 + group);  // all threads of the group are done with K
    load_tile(k_smem, work.k_gmem, params.k_strides.row, next_tile, work.key_tiles, params.seq_k, thread_in_group);

    // mask; only tiles that cross the diagonal or the last key need it
    if (first_key + BLOCK_N > min(params.seq_k, work.diagonal)) {
      fa::mask(s, params.seq_k, work.diagonal + lane_row, first_key, lane);
    }

    // row max
    float m_new[LANE_ROWS];
    const bool needs_rescale = fa::max_of_rows(m_new, s, m, scale_log2);

    // rescale, if any row of the warp needs it
    if (__any_sync(0xffffffffu, needs_rescale)) fa::rescale(o, m, l, m_new, scale_log2);

    const float m_log2[LANE_ROWS] = {fa::finite_log2(m[0], scale_log2), fa::finite_log2(m[1], scale_log2)};
    fa::cp_async_wait_group<2 * STAGES - 1>();
    fa::barrier_sync<GROUP_THREADS>(1 + group);  // V is visible to the group
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two adjacent accumulator fragments of S form one A fragment of P
      uint32_t p[4];
      fa::exp2_fragment<T>(p, s, n, scale_log2, m_log2, l);

      // O += P V, overlapping with the computation of the next P
      fa::multiply_pv(o, p, v_smem, n * MMA_N, lane);
    }

    // Load the next V.
    if (next_tile < work.key_tiles) fa::barrier_sync<GROUP_THREADS>(1 + group);  // all threads of the group are done with V
    load_tile(v_smem, work.v_gmem, params.v_strides.row, next_tile, work.key_tiles, params.seq_k, thread_in_group);
  }

  // Merge.  Each group merges D_TILES_PER_GROUP columns of O.
  fa::barrier_sync<GROUP_THREADS>(1 + group);  // all threads of the group are done with the ring
  float4 own_o[D_TILES_PER_GROUP];
  store_partial(smem, own_o, o, m, l, group, thread_in_group, lane_row);
  __syncthreads();  // the partial O, m and l of all groups are visible to all threads
  Merged merged = merge_groups(smem, own_o, group, thread_in_group, lane_row, scale_log2);
  store<T>(merged, params, work.first_query + lane_row, group, lane);
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Params params;
  if (int status = fa::make_params(args, BLOCK_M, 1, &params)) return status;
  constexpr auto kernel = &split_warps_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  if (int status = fa::allow_smem<kernel>(args, smem_bytes)) return status;
  const dim3 grid(params.heads, (params.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  kernel<<<grid, THREADS, smem_bytes, stream>>>(params);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)
