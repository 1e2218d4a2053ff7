// cluster_wgmma: a warpgroup in place of four warps; the tensor core reads Q, K and V from shared memory by itself.
// step:    wgmma in place of mma.sync and ldmatrix, P V under the next P; one exchange among all groups of all blocks
// because: in cluster_split S = Q K^T, the exponentials and P V follow one another, and O is merged twice
// expect:  4.0 to 4.5 us at the mission shape; what is left of the three is the exponentials
// tile:    64 queries x GROUP_KEYS keys per group and block; 112 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, both causal corners, grouped heads; rows contiguous and
//          16-byte aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa/call.cuh"
#include "fa/hopper.cuh"
#include "fa/launch.h"
#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

// Barriers have names, so that a test can leave one out and see that it is missed.
enum Barrier { NONE, Q_THERE, K_THERE, V_THERE, KV_LEFT, EXCHANGED };

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int QUAD = 4;  // lanes that share a row of a fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes
constexpr int BLOCK_M = 64;                    // what wgmma takes
constexpr int HALF_KEYS = 64;                  // of a group's keys: S of one half is read while that of the next is computed
constexpr int HALVES = GROUP_KEYS / HALF_KEYS;
constexpr int N_TILES = HALF_KEYS / MMA_N;
constexpr int D_TILES = HEAD_DIM / MMA_N;
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = KEY_GROUPS * GROUP_THREADS;
constexpr int OWNERS = CLUSTER * KEY_GROUPS;   // groups of all blocks: each has its keys, and owns its part of the merged O
constexpr int PASS_KEYS = OWNERS * GROUP_KEYS;  // that a cluster holds at once
constexpr int PIECES = 2 * D_TILES / OWNERS;   // of a lane's part of the merged O: 2 neighbours in a row, row by row
constexpr int ROWS = PIECES > D_TILES ? 2 : 1;  // that these lie in
constexpr int EXCHANGE_BYTES = (OWNERS - 1) * GROUP_THREADS * (PIECES + ROWS) * 8;  // that an owner gets from the others
constexpr float LAZY_LOG2 = 8.0f;  // P may grow to 2^8 before O is rescaled: fp16 holds 2^15, and its precision is relative

static_assert(GROUP_KEYS % HALF_KEYS == 0 && HALVES <= 2, "64 or 128 keys");
static_assert(PIECES * OWNERS == 2 * D_TILES && PIECES % 2 == 0, "everyone owns as many pieces, and they travel by two");
static_assert(PIECES % QUAD == 0 || PIECES < QUAD, "they are stored by four, or as they are");
static_assert(CLUSTER <= 8, "larger clusters are not portable");
static_assert(KEY_GROUPS <= 15, "a named barrier for every group");

template <typename T>
struct Smem {
  alignas(1024) T q[BLOCK_M * HEAD_DIM];
  struct alignas(1024) Group {
    T k[GROUP_KEYS * HEAD_DIM];
    T v[GROUP_KEYS * HEAD_DIM];
  } group[KEY_GROUPS];
  float4 pieces[OWNERS][PIECES / 2][THREADS];  // what each owner sends to the threads of this block
  float2 m_and_l[OWNERS][ROWS][THREADS];       // row max, before the scale, and row sum that they are relative to
  uint64_t exchanged[KEY_GROUPS];              // barrier: all of it has come for the group
};

// What one block works on: BLOCK_M queries of one head.
struct Block {
  const uint4* q_gmem;  // [seq_q, HEAD_DIM / VECTOR], in steps of q_steps.row
  const uint4* k_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  const uint4* v_gmem;  // [seq_k, HEAD_DIM / VECTOR]
  int first_query;
  int diagonal;  // query i of the block sees keys [0, min(seq_k, diagonal + i))
  int passes;    // over the keys that any of these queries sees
};

__device__ __forceinline__ Block find_block(const fa::Call& call) {
  const uint32_t head = blockIdx.x / CLUSTER, batch = blockIdx.z, kv_head = fa::kv_head_of(call, head);
  const int first_query = blockIdx.y * BLOCK_M;
  const int diagonal = call.first_diagonal + first_query;
  const int keys = max(0, min(call.seq_k, diagonal + BLOCK_M - 1));
  return {
      call.q + (uint64_t(batch) * call.q_steps.batch + uint64_t(head) * call.q_steps.head),
      call.k + (uint64_t(batch) * call.k_steps.batch + uint64_t(kv_head) * call.k_steps.head),
      call.v + (uint64_t(batch) * call.v_steps.batch + uint64_t(kv_head) * call.v_steps.head),
      first_query,
      diagonal,
      (keys + PASS_KEYS - 1) / PASS_KEYS,
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

template <Barrier WHICH>
__device__ __forceinline__ void sync_block() {
  if (WHICH != OMIT_BARRIER) __syncthreads();
}

template <Barrier WHICH>
__device__ __forceinline__ void sync_group(int group) {
  if (WHICH != OMIT_BARRIER) fa::barrier_sync<GROUP_THREADS>(1 + group);
}

// Load one half of a group's K, a cp.async group.
template <typename T>
__device__ __forceinline__ void load_k(T* k_smem, const Block& block, const fa::Call& call, int first_key, int half, uint32_t loader) {
  T* half_smem = k_smem + half * HALF_KEYS * HEAD_DIM;
  copy_rows<HALF_KEYS, GROUP_THREADS>(half_smem, block.k_gmem, call.k_steps.row, first_key + half * HALF_KEYS, call.seq_k, loader);
  fa::cp_async_commit_group();
}

// Load a group's V, a cp.async group.
template <typename T>
__device__ __forceinline__ void load_v(T* v_smem, const Block& block, const fa::Call& call, int first_key, uint32_t loader) {
  copy_rows<GROUP_KEYS, GROUP_THREADS>(v_smem, block.v_gmem, call.v_steps.row, first_key, call.seq_k, loader);
  fa::cp_async_commit_group();
}

template <typename T>
__global__ void __launch_bounds__(THREADS) cluster_wgmma_kernel(const fa::Call call) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<T>& smem = *reinterpret_cast<Smem<T>*>(smem_bytes);
  const int group = threadIdx.x / GROUP_THREADS, loader = threadIdx.x % GROUP_THREADS, lane = threadIdx.x % WARP;
  const Block block = find_block(call);
  const int first_row = loader / WARP * MMA_M + lane / QUAD;  // this lane's rows of S, P and O: this one and the eighth after it
  const uint32_t head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int me = rank * KEY_GROUPS + group;  // among the owners

  // Load K, Q and V, in the order of their use.  Q, whose parameters are in the second line, counts with the first half of K.
  // The branch keeps the compiler from reading the second line first; without keys every score is masked.
  T* k_smem = smem.group[group].k;
  T* v_smem = smem.group[group].v;
  if (me * GROUP_KEYS < call.seq_k) {
    copy_rows<HALF_KEYS, GROUP_THREADS>(k_smem, block.k_gmem, call.k_steps.row, me * GROUP_KEYS, call.seq_k, loader);
  }
  copy_rows<BLOCK_M, THREADS>(smem.q, block.q_gmem, call.q_steps.row, block.first_query, call.seq_q, threadIdx.x);
  fa::cp_async_commit_group();
#pragma unroll
  for (int half = 1; half < HALVES; ++half) load_k(k_smem, block, call, me * GROUP_KEYS, half, loader);
  load_v(v_smem, block, call, me * GROUP_KEYS, loader);
  if (threadIdx.x == 0) {
    for (uint64_t& each : smem.exchanged) {
      fa::mbarrier_init(&each, 1);
      fa::mbarrier_arrive_expect_tx(&each, EXCHANGE_BYTES);
    }
    fa::fence_mbarrier_init();
  }
  if (CLUSTER > 1) {
    __syncwarp();
    fa::barrier_cluster_arrive_relaxed();  // this block runs and has its barriers: the others may send when all are here
  }

  const float scale_log2 = fa::scale_log2_of(call);
  float o[D_TILES][4] = {};
  float m[2] = {-CUDART_INF_F, -CUDART_INF_F};  // row max that P is relative to, before the scale
  float l[2] = {};                              // this lane's part of the running row sum

  for (int pass = 0; pass < block.passes; ++pass) {
    const int first_key = me * GROUP_KEYS + pass * PASS_KEYS;

    // Load K and V: those of the first pass are on their way.
    if (pass > 0) {
      sync_group<KV_LEFT>(group);  // the group has left the last pass
#pragma unroll
      for (int half = 0; half < HALVES; ++half) load_k(k_smem, block, call, first_key, half, loader);
      load_v(v_smem, block, call, first_key, loader);
    }

    // S = Q K^T
    float s[HALVES][N_TILES][4];
    const uint64_t q = fa::wgmma_descriptor(smem.q), k = fa::wgmma_descriptor(k_smem);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      if (half + 1 < HALVES) {
        fa::cp_async_wait_group<2>();
      } else {
        fa::cp_async_wait_group<1>();
      }
      fa::fence_proxy_async();
      if (half == 0) {
        sync_block<Q_THERE>();  // Q is there for everyone, and half of K for the group
      } else {
        sync_group<K_THERE>(group);  // the other half of K is there for the group
      }
      fa::wgmma_fence();
#pragma unroll
      for (int d = 0; d < HEAD_DIM / MMA_K; ++d) {
        constexpr int STEP = MMA_K * sizeof(T) >> 4, HALF = HALF_KEYS * HEAD_DIM * sizeof(T) >> 4;
        fa::wgmma_m64k16<T, 0>(s[half], q + d * STEP, k + half * HALF + d * STEP, d > 0);
      }
      fa::wgmma_commit_group();
    }

    float m_new[2] = {m[0], m[1]};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      if (half + 1 < HALVES) {
        fa::wgmma_wait_group<1>();
      } else {
        fa::wgmma_wait_group<0>();
      }
      if (fa::is_turned(call)) {  // a negative scale turns the scores around
#pragma unroll
        for (auto& tile : s[half]) {
          for (float& each : tile) each = -each;
        }
      }

      // mask; the first keys are seen by every query of the block
      const int first_of_half = first_key + half * HALF_KEYS;
      if (first_of_half + HALF_KEYS > min(call.seq_k, block.diagonal)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int limit = min(call.seq_k, block.diagonal + first_row + i / 2 * 8) - first_of_half;
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) {
            if (n * MMA_N + lane % QUAD * 2 + i % 2 >= limit) s[half][n][i] = -CUDART_INF_F;
          }
        }
      }

      // row max
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) m_new[r] = fmaxf(m_new[r], fmaxf(s[half][n][2 * r], s[half][n][2 * r + 1]));
      }
    }
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_new[r] = fa::max_of_quad(m_new[r]);
      rises |= (m_new[r] - m[r]) * scale_log2 > LAZY_LOG2;  // from -inf it does, -inf itself gives NaN: it does not
    }

    // rescale, where a row of the warp needs it; the first pass has nothing yet
    if (pass == 0) {
      m[0] = m_new[0];
      m[1] = m_new[1];
    } else if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float m_log2 = m_new[r] == -CUDART_INF_F ? 0.0f : m_new[r] * scale_log2;
        const float rescale = fa::ex2_approx_ftz(m[r] * scale_log2 - m_log2);
        m[r] = m_new[r];
        l[r] *= rescale;
#pragma unroll
        for (int d = 0; d < D_TILES; ++d) {
          o[d][2 * r] *= rescale;
          o[d][2 * r + 1] *= rescale;
        }
      }
    }

    fa::cp_async_wait_group<0>();
    fa::fence_proxy_async();
    sync_group<V_THERE>(group);  // V is there for the group
    const uint64_t v = fa::wgmma_descriptor(v_smem);
    float m_log2[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) m_log2[r] = m[r] == -CUDART_INF_F ? 0.0f : m[r] * scale_log2;  // no key seen yet: 2^(-inf - 0) = 0
#pragma unroll
    for (int n = 0; n < HALVES * N_TILES; n += 2) {
      // P = exp2(S - m), row sum; two neighbouring fragments of S are one of P
      uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&tile)[4] = s[n / N_TILES][n % N_TILES + i / 2];
        const int r = i % 2;
        const float p0 = fa::ex2_approx_ftz(tile[2 * r] * scale_log2 - m_log2[r]);
        const float p1 = fa::ex2_approx_ftz(tile[2 * r + 1] * scale_log2 - m_log2[r]);
        l[r] += p0 + p1;
        p[i] = fa::cvt_rn_x2<T>(p0, p1);
      }

      // O += P V, while the next P is being computed
      fa::wgmma_fence();
      fa::wgmma_m64k16<T, 1>(o, p, v + n * (MMA_N * HEAD_DIM * sizeof(T) >> 4), true);
      fa::wgmma_commit_group();
    }
    fa::wgmma_wait_group<0>();
  }

  // Merge: each owner gets its pieces from all others, with what they are relative to.
  if (block.passes == 0) __syncthreads();  // the barriers are there for everyone
  if (CLUSTER > 1) fa::barrier_cluster_wait();
  float2 mine[PIECES], m_and_l[ROWS];
#pragma unroll
  for (int r = 0; r < 2; ++r) l[r] = fa::sum_of_quad(l[r]);
#pragma unroll
  for (int to = 0; to < OWNERS; ++to) {
    const int row = to * PIECES / D_TILES, d = to * PIECES % D_TILES, thread = to % KEY_GROUPS * GROUP_THREADS + loader;
    const uint32_t barrier = fa::mapa(fa::smem_address(&smem.exchanged[to % KEY_GROUPS]), to / KEY_GROUPS);
#pragma unroll
    for (int i = 0; i < PIECES; i += 2) {
      const int r = row + (d + i) / D_TILES, column = (d + i) % D_TILES;
      const float4 two = make_float4(o[column][2 * r], o[column][2 * r + 1], o[column + 1][2 * r], o[column + 1][2 * r + 1]);
      if (to == me) {
        mine[i] = make_float2(two.x, two.y);
        mine[i + 1] = make_float2(two.z, two.w);
      } else {
        fa::st_async(fa::mapa(fa::smem_address(&smem.pieces[me][i / 2][thread]), to / KEY_GROUPS), two, barrier);
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float2 both = make_float2(m[row + i], l[row + i]);
      if (to == me) {
        m_and_l[i] = both;
      } else {
        fa::st_async(fa::mapa(fa::smem_address(&smem.m_and_l[me][i][thread]), to / KEY_GROUPS), both, barrier);
      }
    }
  }
  if (OWNERS > 1 && OMIT_BARRIER != EXCHANGED) {
    while (!fa::mbarrier_try_wait(&smem.exchanged[group], 0)) {
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float2 found[OWNERS];
    float m_all = -CUDART_INF_F, sum = 0.0f, weight[OWNERS];
#pragma unroll
    for (int from = 0; from < OWNERS; ++from) {
      found[from] = from == me ? m_and_l[i] : smem.m_and_l[from][i][threadIdx.x];
      m_all = fmaxf(m_all, found[from].x);
    }
    const float m_log2 = m_all == -CUDART_INF_F ? 0.0f : m_all * scale_log2;
#pragma unroll
    for (int from = 0; from < OWNERS; ++from) {
      weight[from] = fa::ex2_approx_ftz(found[from].x * scale_log2 - m_log2);
      sum += found[from].y * weight[from];
    }

    // Normalise; a row that sees no key is zero and its log-sum-exp is -inf.
    const float inverse_l = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int j = i * PIECES / ROWS; j < (i + 1) * PIECES / ROWS; j += 2) {
      float4 merged = {};
#pragma unroll
      for (int from = 0; from < OWNERS; ++from) {
        const float4 own = make_float4(mine[j].x, mine[j].y, mine[j + 1].x, mine[j + 1].y);
        const float4 part = from == me ? own : smem.pieces[from][j / 2][threadIdx.x];
        merged.x += part.x * weight[from];
        merged.y += part.y * weight[from];
        merged.z += part.z * weight[from];
        merged.w += part.w * weight[from];
      }
      mine[j] = make_float2(merged.x * inverse_l, merged.y * inverse_l);
      mine[j + 1] = make_float2(merged.z * inverse_l, merged.w * inverse_l);
    }
    const int query = block.first_query + first_row + (me * PIECES / D_TILES + i) * 8;
    if (call.lse != nullptr && me * PIECES % D_TILES == 0 && lane % QUAD == 0 && query < call.seq_q) {
      float* lse_gmem = call.lse + (uint64_t(blockIdx.z) * call.heads + head) * call.seq_q;
      lse_gmem[query] = sum > 0.0f ? (m_log2 + log2f(sum)) * CUDART_LN2_F : -CUDART_INF_F;
    }
  }

  // Store: the lanes of a quad trade pieces, so that each has 16 bytes in a row; where there are too few, 4 bytes each.
  uint4* out_gmem = call.out + (uint64_t(blockIdx.z) * call.out_steps.batch + uint64_t(head) * call.out_steps.head);
#pragma unroll
  for (int i = 0; i < PIECES; i += QUAD) {
    uint32_t rounded[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; ++j) rounded[j] = i + j < PIECES ? fa::cvt_rn_x2<T>(mine[i + j].x, mine[i + j].y) : 0;
    constexpr bool IS_WHOLE = PIECES % QUAD == 0;
    if (IS_WHOLE) fa::transpose_quad(rounded, lane);
#pragma unroll
    for (int j = 0; j < (IS_WHOLE ? 1 : PIECES % QUAD); ++j) {
      const int stored = me * PIECES + i + (IS_WHOLE ? lane % QUAD : j);
      const int query = block.first_query + first_row + stored / D_TILES * 8;
      if (query >= call.seq_q) continue;
      uint4* to_gmem = out_gmem + (uint64_t(query) * call.out_steps.row + stored % D_TILES);
      if (IS_WHOLE) {
        *to_gmem = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
      } else {
        reinterpret_cast<uint32_t*>(to_gmem)[lane % QUAD] = rounded[j];
      }
    }
  }
}

template <typename T>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  fa::Call call;
  if (int status = fa::make_call(args, BLOCK_M, CLUSTER, &call)) return status;
  auto* kernel = &cluster_wgmma_kernel<T>;
  constexpr int smem_bytes = sizeof(Smem<T>);
  static fa::OncePerDevice allow_smem;
  if (int status = allow_smem([&] { return fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(kernel), smem_bytes); })) {
    return status;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {CLUSTER, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(call.heads * CLUSTER, (call.seq_q + BLOCK_M - 1) / BLOCK_M, static_cast<unsigned>(args->batch));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = CLUSTER > 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, call));
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM_) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM_) return launch<DTYPE>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}
