// block_tiled: the threads of a block share tiles of K and V in shared memory; one thread still computes one row.
// step:    K and V go through shared memory, tile by tile, with loads of VEC_WIDTH elements
// because: in minimal every thread reads every key from global memory, two bytes at a time
// expect:  a few times faster than minimal; most of the GPU is still idle, because there is only one thread per row
// diff:    large, because tiles and copies start here; the following rungs include them (fa/tile.cuh, fa/copy.cuh)
// tile:    BLOCK_M queries x BLOCK_N keys, one query per thread; 16 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, grouped heads, top-left and bottom-right causal masks; rows
//          contiguous and aligned to VEC_WIDTH elements
#include <math_constants.h>

#include "fa/entry.h"
#include "fa/grid.h"
#include "fa/to_float.cuh"

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int THREADS = BLOCK_M;

static_assert(BLOCK_M % WARP == 0 && BLOCK_M <= 1024, "a block must be a whole number of warps and at most 1024 threads");
static_assert(VEC_WIDTH == 1 || VEC_WIDTH == 2 || VEC_WIDTH == 4 || VEC_WIDTH == 8, "a load must be 2, 4, 8 or 16 bytes");
static_assert(BLOCK_N * HEAD_DIM * 2 * 2 <= 48 * 1024, "the tiles must fit into 48 KB of static shared memory");

// VEC_WIDTH adjacent elements of a row, loaded and stored with one instruction.
template <typename T>
struct alignas(sizeof(T) * VEC_WIDTH) Vector {
  T data[VEC_WIDTH];
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
template <int ROWS, typename T>
__device__ void copy_rows(T (*to_smem)[HEAD_DIM], const T* from_gmem, int64_t row_stride, int first_row, int seq) {
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM / VEC_WIDTH; i += THREADS) {
    const int row = i / (HEAD_DIM / VEC_WIDTH), column = i % (HEAD_DIM / VEC_WIDTH) * VEC_WIDTH;
    Vector<T> elements = {};
    if (first_row + row < seq) elements = *reinterpret_cast<const Vector<T>*>(from_gmem + (first_row + row) * row_stride + column);
    *reinterpret_cast<Vector<T>*>(&to_smem[row][column]) = elements;
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) block_tiled_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  __shared__ __align__(16) T k_smem[BLOCK_N][HEAD_DIM];
  __shared__ __align__(16) T v_smem[BLOCK_N][HEAD_DIM];
  const WorkTile<T> work = make_work_tile<T>(args, heads_per_kv_head);
  const int row = threadIdx.x, query = work.first_query + row;

  // Load Q, scaled for exp2: exp(x) = 2^(x log2 e).
  const float scale_log2 = args.scale * CUDART_L2E_F;
  float q[HEAD_DIM] = {};
  if (query < work.seq_q) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += VEC_WIDTH) {
      const Vector<T> elements = *reinterpret_cast<const Vector<T>*>(work.q_gmem + query * args.q_stride.seq + d);
#pragma unroll
      for (int i = 0; i < VEC_WIDTH; ++i) q[d + i] = fa::to_float(elements.data[i]) * scale_log2;
    }
  }

  float o[HEAD_DIM] = {};
  float m = -CUDART_INF_F;  // running row max, in log2
  float l = 0.0f;           // running row sum

  for (int key_tile = 0; key_tile < work.key_tiles; ++key_tile) {
    const int first_key = key_tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // all threads are done with the previous tile
    copy_rows<BLOCK_N>(k_smem, work.k_gmem, args.k_stride.seq, first_key, work.seq_k);
    copy_rows<BLOCK_N>(v_smem, work.v_gmem, args.v_stride.seq, first_key, work.seq_k);
    __syncthreads();  // K and V are visible to all threads

    const int limit = min(BLOCK_N, min(work.seq_k, work.diagonal + row) - first_key);
    for (int key = 0; key < limit; ++key) {
      // S = Q K^T
      float s = 0.0f;
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += VEC_WIDTH) {
        const Vector<T> k = *reinterpret_cast<const Vector<T>*>(&k_smem[key][d]);
#pragma unroll
        for (int i = 0; i < VEC_WIDTH; ++i) s += q[d + i] * fa::to_float(k.data[i]);
      }

      // row max
      const float m_new = fmaxf(m, s);

      // rescale; at the first key m is -inf, and exp2(-inf) = 0
      const float rescale = exp2f(m - m_new);
      m = m_new;

      // P = exp2(S - m), row sum
      const float p = exp2f(s - m);
      l = l * rescale + p;

      // O += P V
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += VEC_WIDTH) {
        const Vector<T> v = *reinterpret_cast<const Vector<T>*>(&v_smem[key][d]);
#pragma unroll
        for (int i = 0; i < VEC_WIDTH; ++i) o[d + i] = o[d + i] * rescale + p * fa::to_float(v.data[i]);
      }
    }
  }

  // Normalise and store.  A row that sees no key is zero, and its log-sum-exp is -inf.
  if (query >= work.seq_q) return;
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  const float inverse_l = l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += VEC_WIDTH) {
    Vector<T> rounded;
#pragma unroll
    for (int i = 0; i < VEC_WIDTH; ++i) fa::from_float(&rounded.data[i], o[d + i] * inverse_l);
    *reinterpret_cast<Vector<T>*>(out_gmem + query * args.out_stride.seq + d) = rounded;
  }
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
  if (args.lse != nullptr) lse_gmem[query] = l == 0.0f ? -CUDART_INF_F : (m + log2f(l)) * CUDART_LN2_F;
}

template <typename T, int>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  dim3 grid;
  if (int status = fa::make_grid(args, BLOCK_M, VEC_WIDTH, &grid)) return status;
  block_tiled_kernel<T><<<grid, THREADS, 0, stream>>>(fa_copy_args(args), static_cast<unsigned>(args->heads / args->kv_heads));
  return static_cast<int>(cudaPeekAtLastError());
}

FA_FORWARD(launch)
