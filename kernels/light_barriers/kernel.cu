// light_barriers: within a row, only the threads that share data wait for each other; 8 warps.
// step:    within a row only the warp that owns it waits, not the block (see SYNC_POLICY); 8 warps instead of 4
// because: the P of a row belongs to one warp, but warp_reduce stops the whole block for it twice per row
// expect:  a third less time than warp_reduce: two block barriers per tile instead of 18
// tile:    BLOCK_M queries x BLOCK_N keys, BLOCK_M / NUM_WARPS queries per warp; 26 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, grouped heads, top-left and bottom-right causal masks; rows
//          contiguous and aligned to VEC_WIDTH elements
#include <math_constants.h>

#include "fa/copy.cuh"
#include "fa/entry.h"
#include "fa/grid.h"
#include "fa/tile.cuh"
#include "fa/to_float.cuh"

using fa::WARP;

constexpr int HEAD_DIM = 64;
constexpr int PAD = 8;  // 16 bytes after each row shift the next row by four banks
constexpr int THREADS = NUM_WARPS * WARP;
constexpr int ROWS_PER_WARP = BLOCK_M / NUM_WARPS;
constexpr int KEYS_PER_LANE = BLOCK_N / WARP;   // a lane computes S for keys lane, lane + 32, ...
constexpr int DIMS_PER_LANE = HEAD_DIM / WARP;  // a lane owns adjacent dimensions of O

// How a warp reduces the max and the sum of a row: in lane 0 alone, or with warp shuffles.
enum Reduce { serial, warp };

static_assert(SYNC_POLICY >= 0 && SYNC_POLICY <= 2, "SYNC_POLICY must be 0, 1 or 2: two, one or no block barriers per row");
static_assert(NUM_WARPS <= 32, "a block has at most 1024 threads");
static_assert(BLOCK_M % NUM_WARPS == 0, "every warp must own the same number of rows");
static_assert(BLOCK_N % WARP == 0, "every lane must own the same number of keys");
static_assert(DIMS_PER_LANE == 2, "a lane reads its two dimensions of V with one load");
static_assert(VEC_WIDTH == 1 || VEC_WIDTH == 2 || VEC_WIDTH == 4 || VEC_WIDTH == 8, "a load must be 2, 4, 8 or 16 bytes");

// VEC_WIDTH adjacent elements of a row, loaded and stored with one instruction.
template <typename T>
using Vector = fa::Vector<T, VEC_WIDTH>;

template <typename T>
struct Smem {
  alignas(16) T q[BLOCK_M][HEAD_DIM + PAD];
  T k[BLOCK_N][HEAD_DIM + PAD];
  T v[BLOCK_N][HEAD_DIM + PAD];
  float p[NUM_WARPS][BLOCK_N];         // P of the row that each warp is computing
  float lane_values[NUM_WARPS][WARP];  // for REDUCE = serial
};

// Combines the values of the 32 lanes of a warp; every lane gets the result.
template <typename Combine>
__device__ float reduce_row(float value, float* lane_values_smem, Combine combine) {
  const int lane = threadIdx.x % WARP;
  if (REDUCE == warp) {
    for (int step = WARP / 2; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
  }
  __syncwarp();  // all lanes have read the previous result
  lane_values_smem[lane] = value;
  __syncwarp();  // the values of all lanes are visible to the warp
  if (lane == 0) {
    for (int i = 1; i < WARP; ++i) value = combine(value, lane_values_smem[i]);
    lane_values_smem[0] = value;
  }
  __syncwarp();  // the result is visible to the warp
  return lane_values_smem[0];
}

// A barrier within a row.  The P of a row belongs to one warp, so a warp barrier is enough.  If SYNC_POLICY is at most
// LAST_BLOCK_POLICY, it is a block barrier, as in warp_reduce.
template <int LAST_BLOCK_POLICY>
__device__ __forceinline__ void sync_row() {
  if (SYNC_POLICY <= LAST_BLOCK_POLICY) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) light_barriers_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  __shared__ Smem<T> smem;
  const int warp_index = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const fa::WorkTile<T> work = fa::make_work_tile<T, BLOCK_M, BLOCK_N>(args, heads_per_kv_head);
  const auto max_op = [](float a, float b) { return fmaxf(a, b); };
  const auto sum_op = [](float a, float b) { return a + b; };

  // Load Q.
  const float scale_log2 = args.scale * CUDART_L2E_F;  // exp(x) = 2^(x log2 e)
  fa::copy_rows<BLOCK_M, HEAD_DIM, VEC_WIDTH, THREADS>(smem.q, work.q_gmem, args.q_stride.seq, work.first_query, work.seq_q);

  float o[ROWS_PER_WARP][DIMS_PER_LANE] = {};
  float m[ROWS_PER_WARP];       // running row max, in log2
  float l[ROWS_PER_WARP] = {};  // running row sum
  for (float& row_max : m) row_max = -CUDART_INF_F;

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // all threads are done with the previous tile
    fa::copy_rows<BLOCK_N, HEAD_DIM, VEC_WIDTH, THREADS>(smem.k, work.k_gmem, args.k_stride.seq, first_key, work.seq_k);
    fa::copy_rows<BLOCK_N, HEAD_DIM, VEC_WIDTH, THREADS>(smem.v, work.v_gmem, args.v_stride.seq, first_key, work.seq_k);
    __syncthreads();  // Q, K and V are visible to all threads

#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
      const int row = warp_index * ROWS_PER_WARP + r;
      const int limit = min(work.seq_k, work.diagonal + row) - first_key;

      // S = Q K^T
      float s[KEYS_PER_LANE] = {};
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += VEC_WIDTH) {
        const Vector<T> q = *reinterpret_cast<const Vector<T>*>(&smem.q[row][d]);
#pragma unroll
        for (int n = 0; n < KEYS_PER_LANE; ++n) {
          const Vector<T> k = *reinterpret_cast<const Vector<T>*>(&smem.k[n * WARP + lane][d]);
#pragma unroll
          for (int i = 0; i < VEC_WIDTH; ++i) s[n] += fa::to_float(q.data[i]) * fa::to_float(k.data[i]);
        }
      }

      // scale, mask
#pragma unroll
      for (int n = 0; n < KEYS_PER_LANE; ++n) s[n] = n * WARP + lane < limit ? s[n] * scale_log2 : -CUDART_INF_F;

      // row max
      float m_new = m[r];
#pragma unroll
      for (int n = 0; n < KEYS_PER_LANE; ++n) m_new = fmaxf(m_new, s[n]);
      m_new = reduce_row(m_new, smem.lane_values[warp_index], max_op);
      const float m_finite = m_new == -CUDART_INF_F ? 0.0f : m_new;  // no key seen yet: exp2(-inf - 0) = 0

      // rescale
      const float rescale = exp2f(m[r] - m_finite);
      m[r] = m_new;

      // P = exp2(S - m), row sum
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < KEYS_PER_LANE; ++n) {
        const float p = exp2f(s[n] - m_finite);
        smem.p[warp_index][n * WARP + lane] = p;
        sum += p;
      }
      l[r] = l[r] * rescale + reduce_row(sum, smem.lane_values[warp_index], sum_op);
      sync_row<1>();  // P is visible to the warp

      // O += P V
#pragma unroll
      for (int i = 0; i < DIMS_PER_LANE; ++i) o[r][i] *= rescale;
#pragma unroll 8
      for (int key = 0; key < BLOCK_N; ++key) {
        const float p = smem.p[warp_index][key];
#pragma unroll
        for (int i = 0; i < DIMS_PER_LANE; ++i) o[r][i] += p * fa::to_float(smem.v[key][lane * DIMS_PER_LANE + i]);
      }
      sync_row<0>();  // P may be overwritten
    }
  }

  // Normalise and store.  A row that sees no key is zero, and its log-sum-exp is -inf.
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r) {
    const int query = work.first_query + warp_index * ROWS_PER_WARP + r;
    if (query >= work.seq_q) continue;
    const float inverse_l = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
#pragma unroll
    for (int i = 0; i < DIMS_PER_LANE; ++i) {
      fa::from_float(&out_gmem[query * args.out_stride.seq + lane * DIMS_PER_LANE + i], o[r][i] * inverse_l);
    }
    if (args.lse != nullptr && lane == 0) lse_gmem[query] = l[r] == 0.0f ? -CUDART_INF_F : (m[r] + log2f(l[r])) * CUDART_LN2_F;
  }
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  dim3 grid;
  if (int status = fa::make_grid(args, BLOCK_M, VEC_WIDTH, &grid)) return status;
  light_barriers_kernel<T><<<grid, THREADS, 0, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)
