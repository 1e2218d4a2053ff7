// probe_qk_tile: one tile of scores with tensor cores, S = scale Q K^T, without the rest of attention.
// step:    only the S = Q K^T of swizzle_async, for 32 queries x 64 keys in one block
// because: one tile of scores is the least a tensor-core kernel can do: its time is the launch and one trip to memory
// expect:  device_us within 2 us of noop's; a probe on an NVIDIA L4 once took 5.29 to 5.49 us per call
// tile:    32 queries x 64 keys, 16 x 32 per warp; 12 KB of shared memory per block; a block loops over all key tiles
// takes:   fp16 and bf16, D = 64, S_q a multiple of 32 and S_kv a multiple of 64, no mask; rows contiguous and 16-byte
//          aligned
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fa/params.cuh"
#include "fa/ptx.cuh"
#include "fa/swizzle.cuh"
#include "fa/warp.cuh"
#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;

constexpr int BLOCK_M = 32, BLOCK_N = 64;  // queries and keys of a tile
constexpr int WARP = 32;
constexpr int QUAD = 4;                    // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int VECTOR = 8;                  // 16-bit elements in 16 bytes
constexpr int WARP_KEYS = 32;
constexpr int WARPS_M = BLOCK_M / MMA_M, WARPS_N = BLOCK_N / WARP_KEYS;
constexpr int THREADS = WARPS_M * WARPS_N * WARP;
constexpr int N_TILES = WARP_KEYS / MMA_N;

static_assert(N_TILES == QUAD, "each of the four lanes of a quad stores the 8 keys of one mma");

// The parameters of the kernel.  One thread block computes BLOCK_M queries of one head against all keys.
struct Problem {
  const uint4 *q, *k;  // [batch, heads, seq, HEAD_DIM / VECTOR]
  uint4* out;          // [batch, heads, seq_q, seq_k / VECTOR]
  fa::VectorStrides q_strides, k_strides, out_strides;
  int key_tiles;
  float scale;
};

// The part of a tensor that belongs to this thread block's head.
template <typename Vector>
__device__ Vector* head_of_block(Vector* tensor, const fa::VectorStrides& strides) {
  return tensor + (uint64_t(blockIdx.z) * strides.batch + uint64_t(blockIdx.x) * strides.head);
}

// Copies rows [first_row, first_row + ROWS) of a [seq, HEAD_DIM] tensor.
template <int ROWS, int HEAD_DIM, typename T>
__device__ void copy_rows(T* to_smem, const uint4* from_gmem, uint32_t row_stride, int first_row) {
  constexpr int ROW_VECTORS = HEAD_DIM / VECTOR;
  static_assert(ROWS * ROW_VECTORS % THREADS == 0, "every thread must copy the same number of vectors");
#pragma unroll
  for (int i = 0; i < ROWS * ROW_VECTORS; i += THREADS) {
    const int row = (i + threadIdx.x) / ROW_VECTORS, column = (i + threadIdx.x) % ROW_VECTORS;
    const uint4* vector_gmem = from_gmem + uint64_t(first_row + row) * row_stride + column;
    fa::cp_async_16_or_zero(to_smem + fa::swizzle<HEAD_DIM>(row, column * VECTOR), vector_gmem, true);
  }
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS) probe_qk_tile_kernel(const Problem problem) {
  __shared__ __align__(128) T q_smem[BLOCK_M * HEAD_DIM];
  __shared__ __align__(128) T k_smem[BLOCK_N * HEAD_DIM];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int warp_query = warp / WARPS_N * MMA_M, warp_key = warp % WARPS_N * WARP_KEYS;  // in the tile
  const int first_query = blockIdx.y * BLOCK_M;
  const uint4* k_gmem = head_of_block(problem.k, problem.k_strides);
  uint4* out_gmem = head_of_block(problem.out, problem.out_strides);

  // Load Q, together with the first keys.
  copy_rows<BLOCK_M, HEAD_DIM>(q_smem, head_of_block(problem.q, problem.q_strides), problem.q_strides.row, first_query);

  for (int key_tile = 0; key_tile < problem.key_tiles; ++key_tile) {
    // Load K.
    copy_rows<BLOCK_N, HEAD_DIM>(k_smem, k_gmem, problem.k_strides.row, key_tile * BLOCK_N);
    fa::cp_async_wait_all();
    __syncthreads();  // Q and K are visible to all threads

    // S = Q K^T
    float s[N_TILES][4] = {};
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += MMA_K) {
      uint32_t q[4];
      fa::ldmatrix_x4(q, fa::smem_address(q_smem + fa::swizzle<HEAD_DIM>(warp_query + lane % 16, d + lane / 16 * 8)));
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        uint32_t k[4];  // B fragments of 16 keys: 0 and 1 for the first mma, 2 and 3 for the second
        const int key = warp_key + n * MMA_N + lane / 16 * 8 + lane % 8;
        fa::ldmatrix_x4(k, fa::smem_address(k_smem + fa::swizzle<HEAD_DIM>(key, d + lane / 8 % 2 * 8)));
        fa::mma_m16n8k16<T>(s[n], q, k[0], k[1]);
        fa::mma_m16n8k16<T>(s[n + 1], q, k[2], k[3]);
      }
    }

    // Scale and store.  The lanes of a quad exchange registers, so that each lane stores 16 contiguous bytes.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + warp_query + lane / QUAD + r * 8;
      uint32_t packed[N_TILES];
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        packed[n] = fa::cvt_rn_x2<T>(s[n][2 * r] * problem.scale, s[n][2 * r + 1] * problem.scale);
      }
      fa::transpose_quad(packed, lane);
      const int column = (key_tile * BLOCK_N + warp_key) / VECTOR + lane % QUAD;  // in units of 16 bytes
      out_gmem[uint64_t(query) * problem.out_strides.row + column] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
    if (key_tile + 1 < problem.key_tiles) __syncthreads();  // all threads are done with this key tile
  }
}

template <typename T, int HEAD_DIM>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  if (args->seq_q % BLOCK_M != 0 || args->seq_k % BLOCK_N != 0) {
    return fa_refuse(args, "seq_q is %lld and seq_k %lld; they must be multiples of %d and %d", static_cast<long long>(args->seq_q),
                     static_cast<long long>(args->seq_k), BLOCK_M, BLOCK_N);
  }
  if (args->causal != FA_CAUSAL_NONE || args->kv_heads != args->heads || args->lse != nullptr) {
    return fa_refuse(args, "scores have no mask and no log-sum-exp, and this kernel does not support grouped heads");
  }
  Problem problem = {};
  const bool aligned = fa::vector_strides_of(args->q, args->q_stride, &problem.q_strides) &&
                       fa::vector_strides_of(args->k, args->k_stride, &problem.k_strides) &&
                       fa::vector_strides_of(args->out, args->out_stride, &problem.out_strides);
  if (!aligned) {
    return fa_refuse(args, "rows of q, k and out must be contiguous and start at multiples of 16 bytes; "
                           "strides must be below 2^35 elements");
  }
  const int64_t query_tiles = args->seq_q / BLOCK_M;
  if (args->heads > INT32_MAX || args->batch > UINT16_MAX || query_tiles > UINT16_MAX || args->seq_k > INT32_MAX / 2) {
    return fa_refuse(args, "the shape is too large: batch %lld (at most %d), heads %lld (at most %d), seq_q %lld (at most %d), "
                           "seq_k %lld (below 2^30)",
                     static_cast<long long>(args->batch), UINT16_MAX, static_cast<long long>(args->heads), INT32_MAX,
                     static_cast<long long>(args->seq_q), UINT16_MAX * BLOCK_M, static_cast<long long>(args->seq_k));
  }
  problem.q = static_cast<const uint4*>(args->q);
  problem.k = static_cast<const uint4*>(args->k);
  problem.out = static_cast<uint4*>(args->out);
  problem.key_tiles = static_cast<int>(args->seq_k / BLOCK_N);
  problem.scale = args->scale;
  const dim3 grid(static_cast<unsigned>(args->heads), static_cast<unsigned>(query_tiles), static_cast<unsigned>(args->batch));
  probe_qk_tile_kernel<T, HEAD_DIM><<<grid, THREADS, 0, stream>>>(problem);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
#define LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM) return launch<DTYPE, HEAD_DIM>(args, stream);
  FA_FOR_EACH_INSTANTIATION(LAUNCH_IF)
#undef LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}
