// Loops of what a key tile of attention at D = 64 takes: the matrix products, the softmax, and both at the same time.
// One block per SM, two warpgroups, no copies from global memory.  The scale of a call is the number of its loop, and the
// output, of which one element is written, only keeps the compiler from removing the work.
#include <cuda_fp16.h>

#include <type_traits>

#include "fa/ptx.cuh"
#include "fa/warp.cuh"
#include "fa/warpgroup.cuh"
#include "fa_forward.h"

enum Loop {
  PRODUCTS,       // Q K^T and P V in both warpgroups
  SOFTMAX,        // the softmax of one tile in both warpgroups
  SAME_GROUP,     // each warpgroup: the products of one tile during the softmax of another one
  OTHER_GROUP,    // one warpgroup: the products of two tiles; the other one: the softmax of two tiles
  INTEGER_MAX,    // SAME_GROUP, and the row max of three integers per instruction
  ONES_COLUMN,    // SAME_GROUP, and the row sum by P V with eight more columns
  MAX_OF_THREE,   // only maxima of three integers
  MAX_OF_TWO,     // only maxima of two floats
};

constexpr int GROUPS = 2, GROUP_THREADS = 128, THREADS = GROUPS * GROUP_THREADS;
constexpr int M = 64, KEYS = 128, HEAD_DIM = 64, MMA_K = 16;
constexpr int S_TILES = KEYS / 8, O_TILES = HEAD_DIM / 8;
constexpr int ITERATIONS = 1000;

struct Smem {
  alignas(1024) __half q[GROUPS][M * HEAD_DIM];
  alignas(1024) __half k[KEYS * HEAD_DIM];
  alignas(1024) __half v[KEYS * HEAD_DIM];
  alignas(1024) __half ones[KEYS * HEAD_DIM];
};

// Makes values unknown to the compiler, without an instruction.
template <int TILES>
__device__ __forceinline__ void forget(float (&s)[TILES][4]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) asm volatile("" : "+f"(s[n][0]), "+f"(s[n][1]), "+f"(s[n][2]), "+f"(s[n][3]));
}

// Starts S = Q K^T and O += P V, as two groups of wgmma.
template <int O_TILES_>
__device__ __forceinline__ void start_products(const Smem& smem, int group, float (&s)[S_TILES][4], float (&o)[O_TILES_][4],
                                               const uint32_t (&p)[KEYS / MMA_K][4]) {
  const uint64_t q = fa::wgmma_descriptor(smem.q[group]), k = fa::wgmma_descriptor(smem.k);
  const uint64_t v = fa::wgmma_descriptor(smem.v, sizeof(smem.v));  // the next columns are those of `ones`
  fa::wgmma_fence();
#pragma unroll
  for (int d = 0; d < HEAD_DIM / MMA_K; ++d) fa::wgmma_any_n<__half, 0>(s, q + d * 2, k + d * 2, d > 0);
  fa::wgmma_commit_group();
#pragma unroll
  for (int i = 0; i < KEYS / MMA_K; ++i) fa::wgmma_any_n<__half, 1>(o, p[i], v + i * MMA_K * 128 / 16, true);
  fa::wgmma_commit_group();
}

// The softmax of a tile: row max, exponentials, row sum, P as fragments.  The exponentials are the next tile's scores: the
// same scores in every iteration would let the assembler move the work out of the loop.
template <bool HAS_INTEGERS, bool HAS_SUM>
__device__ __forceinline__ void softmax(float (&s)[S_TILES][4], float (&l)[2], float limit, float scale) {
  bool is_above = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (HAS_INTEGERS) {
      int partial[4] = {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
#pragma unroll
      for (int n = 0; n < S_TILES; ++n) {
        partial[n % 4] = __vimax3_s32(partial[n % 4], __float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1]));
      }
      is_above |= max(__vimax3_s32(partial[0], partial[1], partial[2]), partial[3]) > __float_as_int(limit);
    } else {
      float partial[4] = {s[0][2 * r], s[1][2 * r], s[2][2 * r], s[3][2 * r]};
#pragma unroll
      for (int n = 0; n < S_TILES; ++n) partial[n % 4] = fmaxf(partial[n % 4], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      is_above |= fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3])) > limit;
    }
  }
  if (__any_sync(0xffffffffu, is_above)) l[0] += 1.0f;  // never, but the compiler does not know
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float low = fa::ex2_approx_ftz(s[n][2 * r] * scale - limit), high = fa::ex2_approx_ftz(s[n][2 * r + 1] * scale - limit);
      if (HAS_SUM) l[r] += low + high;
      const uint32_t p = fa::cvt_rn_x2<__half>(low, high);
      asm volatile("" ::"r"(p));
      s[n][2 * r] = low, s[n][2 * r + 1] = high;
    }
  }
}

template <int LOOP>
__global__ void __launch_bounds__(THREADS, 1) pipes_kernel(const __half* q, float* out, float limit, float scale) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  constexpr int HALFS = sizeof(Smem) / sizeof(__half);
  for (int i = threadIdx.x; i < HALFS; i += THREADS) reinterpret_cast<__half*>(smem_bytes)[i] = q[i];
  fa::fence_proxy_async();
  __syncthreads();
  constexpr bool HAS_BOTH = LOOP == SAME_GROUP || LOOP == INTEGER_MAX || LOOP == ONES_COLUMN;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
  float s[S_TILES][4], other_s[S_TILES][4], o[O_TILES + (LOOP == ONES_COLUMN)][4] = {}, l[2] = {};
  uint32_t p[KEYS / MMA_K][4];
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = other_s[n][i] = __half2float(q[(n * 4 + i) * THREADS + threadIdx.x]);
      p[n / 2][n % 2 * 2 + i / 2] = reinterpret_cast<const uint32_t*>(q)[n * THREADS + threadIdx.x] & 0x3fff3fff;  // 0 to 2
    }
  }
  const auto products = [&] {
#pragma unroll 1
    for (int i = 0; i < ITERATIONS; ++i) {
      start_products(smem, group, s, o, p);
      fa::wgmma_wait_group<0>(s);
      fa::wgmma_wait_group<0>(o);
    }
  };
  const auto exponentials = [&] {
#pragma unroll 1
    for (int i = 0; i < ITERATIONS; ++i) softmax<false, true>(other_s, l, limit, scale);
  };
  if constexpr (LOOP == PRODUCTS) {
    products();
  } else if constexpr (LOOP == SOFTMAX) {
    exponentials();
  } else if constexpr (LOOP == OTHER_GROUP) {
    if (group == 0) products(), products(); else exponentials(), exponentials();
  } else if constexpr (HAS_BOTH) {
#pragma unroll 1
    for (int i = 0; i < ITERATIONS; ++i) {
      start_products(smem, group, s, o, p);
      softmax<LOOP == INTEGER_MAX, LOOP != ONES_COLUMN>(other_s, l, limit, scale);
      fa::wgmma_wait_group<0>(s);
      fa::wgmma_wait_group<0>(o);
    }
  } else {
    int maxima[8] = {};
#pragma unroll 1
    for (int i = 0; i < ITERATIONS; ++i) {
      forget(other_s);
#pragma unroll
      for (int n = 0; n < S_TILES * 2; ++n) {
        const float a = other_s[n / 2][n % 2 * 2], b = other_s[n / 2][n % 2 * 2 + 1];
        int& maximum = maxima[n % 8];
        if (LOOP == MAX_OF_THREE) maximum = __vimax3_s32(maximum, __float_as_int(a), __float_as_int(b));
        if (LOOP == MAX_OF_TWO) maximum = __float_as_int(fmaxf(__int_as_float(maximum), a));
      }
    }
    for (int n = 0; n < 8; ++n) l[0] += __int_as_float(maxima[n]);
  }
  float sum = l[0] + l[1];
#pragma unroll
  for (int n = 0; n < O_TILES; ++n) sum += o[n][0] + o[n][3];
#pragma unroll
  for (int n = 0; n < S_TILES; ++n) sum += s[n][0] + other_s[n][1];
  if (sum == 12345.678f) out[0] = sum;
}

template <int LOOP>
int launch(const FaForwardArgs* args, cudaStream_t stream) {
  const auto* function = reinterpret_cast<const void*>(&pipes_kernel<LOOP>);
  if (int error = fa_allow_dynamic_smem(args, function, sizeof(Smem))) return error;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  pipes_kernel<LOOP><<<multiprocessors, THREADS, sizeof(Smem), stream>>>(static_cast<const __half*>(args->q),
                                                                         static_cast<float*>(args->out), 100.0f, 0.18f);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  switch (static_cast<int>(args->scale)) {
    case PRODUCTS: return launch<PRODUCTS>(args, stream);
    case SOFTMAX: return launch<SOFTMAX>(args, stream);
    case SAME_GROUP: return launch<SAME_GROUP>(args, stream);
    case OTHER_GROUP: return launch<OTHER_GROUP>(args, stream);
    case INTEGER_MAX: return launch<INTEGER_MAX>(args, stream);
    case ONES_COLUMN: return launch<ONES_COLUMN>(args, stream);
    case MAX_OF_THREE: return launch<MAX_OF_THREE>(args, stream);
    case MAX_OF_TWO: return launch<MAX_OF_TWO>(args, stream);
    default: return fa_refuse(args, "there is no loop %d", static_cast<int>(args->scale));
  }
}
