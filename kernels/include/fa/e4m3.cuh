// What kernels need that compute both matrix products in e4m3 (sm_89 and above): wrappers of PTX instructions, named after their
// instruction, and the transposition of V.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

#include "fa_forward.h"

namespace fa {

// Rounds four floats to e4m3 and packs them, `a` in the lowest byte.  Numbers above 448 become 448, NaN stays NaN.
__host__ __device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// 9.7.14.5.14 mma: d[16, 8] += a[16, 32] b[32, 8], with row-major a and column-major b.  Lane i holds elements 2 (i % 4) and
// 2 (i % 4) + 1 of rows i / 4 and i / 4 + 8 of d.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The order of keys in P.  An accumulator gives a lane two adjacent keys of each 8, but an A fragment in e4m3 has four adjacent
// columns in one register.  A lane packs its two keys of the first 8 and its two keys of the next 8 into one register, so that
// no lane needs the scores of another.  Column `column` of P then is this key.  V must have its keys in the same order.
__host__ __device__ constexpr int key_of_column(int column) {
  return column / 16 * 16 + column % 4 / 2 * 8 + column % 16 / 4 * 2 + column % 2;
}

// The A fragment of P for 32 keys, from the four accumulator fragments s[first] to s[first + 3].
template <int S_TILES>
__host__ __device__ __forceinline__ void make_p_fragment(uint32_t (&p)[4], const float (&s)[S_TILES][4], int first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of the 32 keys
    const int n = first + 2 * half;
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // rows r and r + 8 of the lane
      p[2 * half + r] = pack_e4m3(s[n][2 * r], s[n][2 * r + 1], s[n + 1][2 * r], s[n + 1][2 * r + 1]);
    }
  }
}

// V^T in the workspace: [batch, kv_heads, head_dim, keys], e4m3.  The keys are in the order of `key_of_column`.  Their number is
// padded to a multiple of 128, and the padding is zero, because P = 0 times what a workspace may contain could be NaN.
constexpr int V_T_KEYS = 128;

inline int64_t v_t_keys(const FaForwardArgs* args) { return (args->seq_k + V_T_KEYS - 1) / V_T_KEYS * V_T_KEYS; }
inline int64_t v_t_bytes(const FaForwardArgs* args) { return args->batch * args->kv_heads * args->head_dim * v_t_keys(args); }

// Each thread transposes 32 keys of four columns of V.
constexpr int PATCH_KEYS = 32, PATCH_COLUMNS = 4, PATCH_WORDS = PATCH_KEYS / 4;
static_assert(V_T_KEYS % PATCH_KEYS == 0, "a thread writes only inside a row of V^T");

// rows[key] has the four columns of a key.  columns[i] receives column i of all keys, in the order of P.  With IN_ORDER, which is
// wrong, the keys keep their order.
template <bool IN_ORDER>
__host__ __device__ __forceinline__ void transpose_patch(
    uint32_t (&columns)[PATCH_COLUMNS][PATCH_WORDS], const uint32_t (&rows)[PATCH_KEYS]) {
#pragma unroll
  for (int word = 0; word < PATCH_WORDS; ++word) {
#pragma unroll
    for (int i = 0; i < PATCH_COLUMNS; ++i) {
      columns[i][word] = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int position = word * 4 + byte;
        columns[i][word] |= (rows[IN_ORDER ? position : key_of_column(position)] >> i * 8 & 0xff) << byte * 8;
      }
    }
  }
}

// Writes V^T.  A warp reads whole rows of V; every thread writes 32 bytes of four rows of V^T.
constexpr int TRANSPOSE_THREADS = 128;

template <int HEAD_DIM, bool IN_ORDER>
__global__ void __launch_bounds__(TRANSPOSE_THREADS)
transpose_v(const uint8_t* v, uint8_t* v_t, FaStrides stride, int seq_k, int keys) {
  constexpr int THREADS_PER_ROW = HEAD_DIM / PATCH_COLUMNS, KEYS_PER_BLOCK = TRANSPOSE_THREADS / THREADS_PER_ROW * PATCH_KEYS;
  const int first_key = blockIdx.x * KEYS_PER_BLOCK + threadIdx.x / THREADS_PER_ROW * PATCH_KEYS;
  const int column = threadIdx.x % THREADS_PER_ROW * PATCH_COLUMNS;
  if (first_key >= keys) return;
  const uint8_t* from_gmem = v + blockIdx.z * stride.batch + blockIdx.y * stride.head + first_key * stride.seq + column;
  uint32_t rows[PATCH_KEYS], columns[PATCH_COLUMNS][PATCH_WORDS];
#pragma unroll
  for (int key = 0; key < PATCH_KEYS; ++key) {
    rows[key] = first_key + key < seq_k ? *reinterpret_cast<const uint32_t*>(from_gmem) : 0;
    from_gmem += stride.seq;
  }
  transpose_patch<IN_ORDER>(columns, rows);
  uint8_t* to_gmem = v_t + ((uint64_t(blockIdx.z) * gridDim.y + blockIdx.y) * HEAD_DIM + column) * keys + first_key;
#pragma unroll
  for (int i = 0; i < PATCH_COLUMNS; ++i) {
#pragma unroll
    for (int word = 0; word < PATCH_WORDS; word += 4) {
      *reinterpret_cast<uint4*>(to_gmem + uint64_t(i) * keys + word * 4) =
          make_uint4(columns[i][word], columns[i][word + 1], columns[i][word + 2], columns[i][word + 3]);
    }
  }
}

// Refuses a call whose workspace is smaller than `bytes`, or not aligned.
inline int check_workspace(const FaForwardArgs* args, int64_t bytes) {
  if (args->workspace_bytes >= static_cast<uint64_t>(bytes) && reinterpret_cast<uintptr_t>(args->workspace) % 16 == 0) return FA_OK;
  return fa_refuse(args, "the workspace has %llu bytes at %p; it needs %lld bytes, aligned to 16",
                   static_cast<unsigned long long>(args->workspace_bytes), args->workspace, static_cast<long long>(bytes));
}

// Launches transpose_v, which writes the workspace.  Returns FA_OK, or refuses the call.
template <int HEAD_DIM, bool IN_ORDER = false>
int launch_transpose_v(const FaForwardArgs* args, cudaStream_t stream) {
  const int64_t keys = v_t_keys(args);
  if (int refusal = check_workspace(args, v_t_bytes(args))) return refusal;
  constexpr int KEYS_PER_BLOCK = TRANSPOSE_THREADS / (HEAD_DIM / PATCH_COLUMNS) * PATCH_KEYS;
  const dim3 grid(static_cast<unsigned>((keys + KEYS_PER_BLOCK - 1) / KEYS_PER_BLOCK), static_cast<unsigned>(args->kv_heads),
                  static_cast<unsigned>(args->batch));
  transpose_v<HEAD_DIM, IN_ORDER><<<grid, TRANSPOSE_THREADS, 0, stream>>>(
      static_cast<const uint8_t*>(args->v), static_cast<uint8_t*>(args->workspace), args->v_stride, static_cast<int>(args->seq_k),
      static_cast<int>(keys));
  return static_cast<int>(cudaPeekAtLastError());
}

// Whether every row of a tensor can be accessed with aligned 16-byte copies, of `elements` elements each.
inline bool is_16_byte_aligned(const void* data, const FaStrides& stride, int elements) {
  // The bitwise OR of the strides is divisible by a power of two if and only if every stride is.
  const int64_t strides_or = stride.batch | stride.head | stride.seq;
  return stride.dim == 1 && strides_or % elements == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Refuses calls whose inputs in e4m3, or whose output in 16 bits, cannot be accessed with aligned 16-byte copies.
inline int check_e4m3_alignment(const FaForwardArgs* args) {
  if (is_16_byte_aligned(args->q, args->q_stride, 16) && is_16_byte_aligned(args->k, args->k_stride, 16) &&
      is_16_byte_aligned(args->v, args->v_stride, 16) && is_16_byte_aligned(args->out, args->out_stride, 8)) {
    return FA_OK;
  }
  return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of 16 bytes");
}

}  // namespace fa
