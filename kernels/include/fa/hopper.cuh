// Wrappers of PTX instructions of sm_90a, named after their instruction.  Each comment begins with the section of the PTX ISA.
#pragma once

#include <cuda.h>

#include "fa/ptx.cuh"

namespace fa {

// 9.7.9.27.1.2 cp.async.bulk.tensor: copies a box of a 4D tensor to the same shared memory offset of each block of the cluster
// whose bit is set in `blocks`.  The bytes are counted by the mbarrier at the offset of `barrier_smem` in each of these blocks.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_multicast(void* to_smem, const CUtensorMap& map, int x, int y, int z, int w,
                                                                  uint64_t* barrier_smem, uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
               :: "r"(smem_address(to_smem)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(smem_address(barrier_smem)),
                  "h"(blocks) : "memory");
}

// 9.7.9.27.1.2 cp.async.bulk.tensor: copies a box of a 4D tensor to the shared memory of this block only.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(void* to_smem, const CUtensorMap& map, int x, int y, int z, int w,
                                                        uint64_t* barrier_smem) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
               :: "r"(smem_address(to_smem)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(smem_address(barrier_smem))
               : "memory");
}

// 9.7.13.14 elect.sync: returns true for one lane of the warp, always the same one.  All 32 lanes must call it.
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

// 9.7.9.15 prefetch.tensormap: brings the tensor map into the cache before the first copy needs it.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// 9.7.13.4 fence.proxy.async: makes the shared memory writes of this thread visible to TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 9.7.15.7.1 wgmma.fence: makes earlier register writes visible to the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// 9.7.15.7.2 wgmma.commit_group: combines all wgmma since the previous commit into one group.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// 9.7.15.7.3 wgmma.wait_group: waits for all but the latest PENDING groups.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// 9.7.15.7.3 wgmma.wait_group: the same, and it keeps the compiler from reading the accumulators `d` before the wait.
template <int PENDING, int N_TILES>
__device__ __forceinline__ void wgmma_wait_group(float (&d)[N_TILES][4]) {
  wgmma_wait_group<PENDING>();
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]) :: "memory");
}

// 9.7.15.5.1 matrix descriptor: a matrix in shared memory with 128-byte rows, 128-byte swizzle, and 1024 bytes per eight rows.
// If N runs along the rows and is longer than one, the next 128 bytes of each row are `next_columns_bytes` further on.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* matrix_smem, uint32_t next_columns_bytes = 16) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(next_columns_bytes >> 4) << 16 |
         (smem_address(matrix_smem) & 0x3ffff) >> 4;
}

// 9.7.15.5.2 wgmma.mma_async: d[64, N] (+)= a[64, 16] b[16, N] by the four warps of a warpgroup, 16 rows per warp.  The
// register fragments are those of mma. b is in shared memory: row-major (contiguous along N) if B_BY_ROWS, else column-major.
#define FA_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FA_D32(i) FA_D4(i), FA_D4(i + 1), FA_D4(i + 2), FA_D4(i + 3), FA_D4(i + 4), FA_D4(i + 5), FA_D4(i + 6), FA_D4(i + 7)
#define FA_R32_0                                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_R32_32                                                                                                 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_WGMMA_N64(TYPE)                                                                                                  \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FA_R32_0 \
               "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"                                                               \
               : FA_D32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(B_BY_ROWS))
#define FA_WGMMA_N128(TYPE)                                                                                                  \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" FA_R32_0 \
               ", " FA_R32_32 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }"                                                 \
               : FA_D32(0), FA_D32(8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(B_BY_ROWS))
#define FA_WGMMA_SS_N64(TYPE)                                                                                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FA_R32_0 \
               "}, %32, %33, p, 1, 1, 0, %35; }" : FA_D32(0) : "l"(a), "l"(b), "r"(int(accumulate)), "n"(B_BY_ROWS))
#define FA_WGMMA_SS_N128(TYPE)                                                                                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" FA_R32_0 \
               ", " FA_R32_32 "}, %64, %65, p, 1, 1, 0, %67; }"                                                               \
               : FA_D32(0), FA_D32(8) : "l"(a), "l"(b), "r"(int(accumulate)), "n"(B_BY_ROWS))

template <typename T, int B_BY_ROWS, int N_TILES>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[N_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N_TILES == 8 || N_TILES == 16, "N is 64 or 128");
  if constexpr (N_TILES == 8) {
    if constexpr (std::is_same_v<T, __half>) FA_WGMMA_N64("f16");
    if constexpr (std::is_same_v<T, __nv_bfloat16>) FA_WGMMA_N64("bf16");
  } else {
    if constexpr (std::is_same_v<T, __half>) FA_WGMMA_N128("f16");
    if constexpr (std::is_same_v<T, __nv_bfloat16>) FA_WGMMA_N128("bf16");
  }
}

// 9.7.15.5.2 wgmma.mma_async: the same with a in shared memory too, row-major (contiguous along the 16 elements of K).
template <typename T, int B_BY_ROWS, int N_TILES>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[N_TILES][4], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N_TILES == 8 || N_TILES == 16, "N is 64 or 128");
  if constexpr (N_TILES == 8) {
    if constexpr (std::is_same_v<T, __half>) FA_WGMMA_SS_N64("f16");
    if constexpr (std::is_same_v<T, __nv_bfloat16>) FA_WGMMA_SS_N64("bf16");
  } else {
    if constexpr (std::is_same_v<T, __half>) FA_WGMMA_SS_N128("f16");
    if constexpr (std::is_same_v<T, __nv_bfloat16>) FA_WGMMA_SS_N128("bf16");
  }
}

#undef FA_D4
#undef FA_D32
#undef FA_R32_0
#undef FA_R32_32
#undef FA_WGMMA_N64
#undef FA_WGMMA_N128
#undef FA_WGMMA_SS_N64
#undef FA_WGMMA_SS_N128

}  // namespace fa
