// warp_reduce: a warp owns a row: its lanes share the keys of S and the dimensions of O.
// step:    a warp per query row in place of a thread; the row max and the row sum by shuffles, or as REDUCE says
// because: block_tiled keeps 128 floats per thread and a row's 512 keys in one thread, one after the other
// expect:  faster than block_tiled by half: 32 lanes per row fill the GPU, but every row waits for the block twice
// diff:    large, since lanes now own keys of S and dimensions of O, where a thread owned all of a row
// tile:    BLOCK_M queries x BLOCK_N keys, BLOCK_M / NUM_WARPS queries per warp; 24 KB of shared memory per block
// takes:   fp16 and bf16, D = 64, any S_q >= 1 and S_kv >= 0, grouped heads, both causal corners; rows contiguous and aligned
//          to VEC_WIDTH elements
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

constexpr int HEAD_DIM = 64;
constexpr int WARP = 32;
constexpr int PAD = 8;  // 16 bytes past a row move the next one by four banks
constexpr int THREADS = NUM_WARPS * WARP;
constexpr int ROWS_PER_WARP = BLOCK_M / NUM_WARPS;
constexpr int KEYS_PER_LANE = BLOCK_N / WARP;  // of S: keys lane, lane + 32, ...
constexpr int DIMS_PER_LANE = HEAD_DIM / WARP;  // of O: neighbours

// How the lanes of a warp find the max and the sum of a row.
enum Reduce { serial, warp };

static_assert(NUM_WARPS <= 32, "a block has at most 1024 threads");
static_assert(BLOCK_M % NUM_WARPS == 0, "every warp owns as many rows");
static_assert(BLOCK_N % WARP == 0, "every lane owns as many keys");
static_assert(DIMS_PER_LANE == 2, "a lane reads its two dimensions of V as one");
static_assert(VEC_WIDTH == 1 || VEC_WIDTH == 2 || VEC_WIDTH == 4 || VEC_WIDTH == 8, "a load is 2, 4, 8 or 16 bytes");

__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(fp16* x, float value) { *x = __float2half_rn(value); }
__device__ __forceinline__ void from_float(bf16* x, float value) { *x = __float2bfloat16_rn(value); }

// VEC_WIDTH neighbours in a row, loaded and stored as one.
template <typename T>
struct alignas(sizeof(T) * VEC_WIDTH) Vector {
  T element[VEC_WIDTH];
};

template <typename T>
struct Smem {
  alignas(16) T q[BLOCK_M][HEAD_DIM + PAD];
  T k[BLOCK_N][HEAD_DIM + PAD];
  T v[BLOCK_N][HEAD_DIM + PAD];
  float p[NUM_WARPS][BLOCK_N];   // of the row that each warp is at
  float lanes[NUM_WARPS][WARP];  // of a serial reduction
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
template <int ROWS, typename T>
__device__ void copy_rows(T (*to_smem)[HEAD_DIM + PAD], const T* from_gmem, int64_t row_stride, int first, int seq) {
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM / VEC_WIDTH; i += THREADS) {
    const int row = i / (HEAD_DIM / VEC_WIDTH), column = i % (HEAD_DIM / VEC_WIDTH) * VEC_WIDTH;
    Vector<T> piece = {};
    if (first + row < seq) piece = *reinterpret_cast<const Vector<T>*>(from_gmem + (first + row) * row_stride + column);
    *reinterpret_cast<Vector<T>*>(&to_smem[row][column]) = piece;
  }
}

// `combine` over the lanes of a warp; everyone gets the result.
template <typename Combine>
__device__ float reduce_row(float x, float* lanes_smem, Combine combine) {
  const int lane = threadIdx.x % WARP;
  if (REDUCE == warp) {
    for (int step = WARP / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
  }
  __syncwarp();  // everyone has read the last result
  lanes_smem[lane] = x;
  __syncwarp();  // every lane's value is there
  if (lane == 0) {
    for (int i = 1; i < WARP; ++i) x = combine(x, lanes_smem[i]);
    lanes_smem[0] = x;
  }
  __syncwarp();  // the result is there
  return lanes_smem[0];
}

template <typename T>
__global__ void __launch_bounds__(THREADS) warp_reduce_kernel(const FaForwardArgs args, unsigned heads_per_kv_head) {
  __shared__ Smem<T> smem;
  const int warp_index = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const Block<T> block = find_block<T>(args, heads_per_kv_head);
  const auto max_of = [](float a, float b) { return fmaxf(a, b); };
  const auto sum_of = [](float a, float b) { return a + b; };

  // Load Q.
  const float scale_log2 = args.scale * CUDART_L2E_F;  // exp(x) = 2^(x log2 e)
  copy_rows<BLOCK_M>(smem.q, block.q_gmem, args.q_stride.seq, block.first_query, block.seq_q);

  float o[ROWS_PER_WARP][DIMS_PER_LANE] = {};
  float m[ROWS_PER_WARP];       // running row max, in log2
  float l[ROWS_PER_WARP] = {};  // running row sum
  for (float& each : m) each = -CUDART_INF_F;

  for (int tile = 0; tile < block.tiles; ++tile) {
    const int first_key = tile * BLOCK_N;

    // Load K and V.
    __syncthreads();  // everyone has left the last tile
    copy_rows<BLOCK_N>(smem.k, block.k_gmem, args.k_stride.seq, first_key, block.seq_k);
    copy_rows<BLOCK_N>(smem.v, block.v_gmem, args.v_stride.seq, first_key, block.seq_k);
    __syncthreads();  // Q, K and V are there for everyone

#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
      const int row = warp_index * ROWS_PER_WARP + r;
      const int limit = min(block.seq_k, block.diagonal + row) - first_key;

      // S = Q K^T
      float s[KEYS_PER_LANE] = {};
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += VEC_WIDTH) {
        const Vector<T> q = *reinterpret_cast<const Vector<T>*>(&smem.q[row][d]);
#pragma unroll
        for (int n = 0; n < KEYS_PER_LANE; ++n) {
          const Vector<T> k = *reinterpret_cast<const Vector<T>*>(&smem.k[n * WARP + lane][d]);
#pragma unroll
          for (int i = 0; i < VEC_WIDTH; ++i) s[n] += to_float(q.element[i]) * to_float(k.element[i]);
        }
      }

      // scale, mask
#pragma unroll
      for (int n = 0; n < KEYS_PER_LANE; ++n) s[n] = n * WARP + lane < limit ? s[n] * scale_log2 : -CUDART_INF_F;

      // row max
      float m_new = m[r];
#pragma unroll
      for (int n = 0; n < KEYS_PER_LANE; ++n) m_new = fmaxf(m_new, s[n]);
      m_new = reduce_row(m_new, smem.lanes[warp_index], max_of);
      const float m_finite = m_new == -CUDART_INF_F ? 0.0f : m_new;  // a row that has seen no key yet: 2^(-inf - 0) = 0

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
      l[r] = l[r] * rescale + reduce_row(sum, smem.lanes[warp_index], sum_of);
      __syncthreads();  // P is there

      // O += P V
#pragma unroll
      for (int i = 0; i < DIMS_PER_LANE; ++i) o[r][i] *= rescale;
#pragma unroll 8
      for (int key = 0; key < BLOCK_N; ++key) {
        const float p = smem.p[warp_index][key];
#pragma unroll
        for (int i = 0; i < DIMS_PER_LANE; ++i) o[r][i] += p * to_float(smem.v[key][lane * DIMS_PER_LANE + i]);
      }
      __syncthreads();  // P may be written again
    }
  }

  // Normalise and store; a row that sees no key is zero and its log-sum-exp is -inf.
  T* out_gmem = static_cast<T*>(args.out) + blockIdx.z * args.out_stride.batch + blockIdx.x * args.out_stride.head;
  float* lse_gmem = args.lse + (blockIdx.z * args.heads + blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r) {
    const int query = block.first_query + warp_index * ROWS_PER_WARP + r;
    if (query >= block.seq_q) continue;
    const float inverse_l = l[r] > 0.0f ? 1.0f / l[r] : 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS_PER_LANE; ++i) {
      from_float(&out_gmem[query * args.out_stride.seq + lane * DIMS_PER_LANE + i], o[r][i] * inverse_l);
    }
    if (args.lse != nullptr && lane == 0) lse_gmem[query] = l[r] > 0.0f ? (m[r] + log2f(l[r])) * CUDART_LN2_F : -CUDART_INF_F;
  }
}

// Whether loads of VEC_WIDTH elements may walk a tensor's rows.
bool is_vector_aligned(const void* data, const FaStrides& stride) {
  const int64_t steps = stride.batch | stride.head | stride.seq;
  return stride.dim == 1 && steps % VEC_WIDTH == 0 && reinterpret_cast<uintptr_t>(data) % (2 * VEC_WIDTH) == 0;
}

template <typename T>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  const bool aligned = is_vector_aligned(args->q, args->q_stride) && is_vector_aligned(args->k, args->k_stride) &&
                       is_vector_aligned(args->v, args->v_stride) && is_vector_aligned(args->out, args->out_stride);
  if (!aligned) {
    return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of %d bytes", 2 * VEC_WIDTH);
  }
  const int64_t blocks_per_head = (args->seq_q + BLOCK_M - 1) / BLOCK_M;
  if (args->heads > INT32_MAX || args->batch > UINT16_MAX || blocks_per_head > UINT16_MAX || args->seq_k > INT32_MAX / 2) {
    return fa_refuse(args, "batch %lld or seq_q %lld is over the grid, or seq_k %lld over 2^30",
                     static_cast<long long>(args->batch), static_cast<long long>(args->seq_q),
                     static_cast<long long>(args->seq_k));
  }
  const dim3 grid(static_cast<unsigned>(args->heads), static_cast<unsigned>(blocks_per_head), static_cast<unsigned>(args->batch));
  warp_reduce_kernel<T><<<grid, THREADS, 0, stream>>>(*args, static_cast<unsigned>(args->heads / args->kv_heads));
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
