// wgmma in e4m3 (sm_90a).  Both operands must be contiguous along K, which is 32 elements; there are no transposed operands.
#pragma once

#include "fa/hopper.cuh"

namespace fa {

// 9.7.15.5.1 matrix descriptor, without its address: rows of 32, 64 or 128 bytes with a swizzle of the same span.  Eight rows are
// contiguous; the next eight follow them.  The distance along K (bits 16 to 29) is not used with a swizzle.
__host__ __device__ constexpr uint64_t k_major_descriptor_bits(int row_bytes) {
  const uint64_t swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return swizzle << 62 | uint64_t(8 * row_bytes >> 4) << 32 | uint64_t(1) << 16;
}

// The descriptor of a matrix in shared memory, which starts at a multiple of eight rows' bytes.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t k_major_descriptor(const void* matrix_smem) {
  static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "a row has 32, 64 or 128 bytes");
  return k_major_descriptor_bits(ROW_BYTES) | (smem_address(matrix_smem) & 0x3ffff) >> 4;
}

// 9.7.15.5.2 wgmma.mma_async: d[64, N] (+)= a[64, 32] b[32, N] by the four warps of a warpgroup, 16 rows per warp.  The
// register fragments are those of mma.
#define FA_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FA_D16(i) FA_D4(i), FA_D4(i + 1), FA_D4(i + 2), FA_D4(i + 3)
#define FA_D32(i) FA_D4(i), FA_D4(i + 1), FA_D4(i + 2), FA_D4(i + 3), FA_D4(i + 4), FA_D4(i + 5), FA_D4(i + 6), FA_D4(i + 7)
#define FA_D20(i) FA_D16(i), FA_D4(i + 4)
#define FA_R16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FA_R32_0                                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_R4_32 "%32, %33, %34, %35"
#define FA_R32_32                                                                                                 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_R16_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FA_R4_64 "%64, %65, %66, %67"
#define FA_R32_64                                                                                                  \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
// N, the registers of d, and the numbers of the operands that follow them.
#define FA_WGMMA_SS(N, REGISTERS, A, B, ACCUMULATE, ...)                                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3" \
               " {" REGISTERS "}, " A ", " B ", p, 1, 1; }" : __VA_ARGS__ : "l"(a), "l"(b), "r"(int(accumulate)))
#define FA_WGMMA_RS(N, REGISTERS, A, B, ACCUMULATE, ...)                                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3" \
               " {" REGISTERS "}, {" A "}, " B ", p, 1, 1; }"                                                              \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)))

// a and b in shared memory.
template <int N_TILES>
__device__ __forceinline__ void wgmma_m64k32_e4m3(float (&d)[N_TILES][4], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N_TILES == 8 || N_TILES == 12 || N_TILES == 16 || N_TILES == 24, "N is 64, 96, 128 or 192");
  if constexpr (N_TILES == 8) FA_WGMMA_SS("64", FA_R32_0, "%32", "%33", "%34", FA_D32(0));
  if constexpr (N_TILES == 12) FA_WGMMA_SS("96", FA_R32_0 ", " FA_R16_32, "%48", "%49", "%50", FA_D32(0), FA_D16(8));
  if constexpr (N_TILES == 16) FA_WGMMA_SS("128", FA_R32_0 ", " FA_R32_32, "%64", "%65", "%66", FA_D32(0), FA_D32(8));
  if constexpr (N_TILES == 24) {
    FA_WGMMA_SS("192", FA_R32_0 ", " FA_R32_32 ", " FA_R32_64, "%96", "%97", "%98", FA_D32(0), FA_D32(8), FA_D32(16));
  }
}

// a in registers, b in shared memory.
template <int N_TILES>
__device__ __forceinline__ void wgmma_m64k32_e4m3(float (&d)[N_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N_TILES == 4 || N_TILES == 5 || N_TILES == 8 || N_TILES == 9 || N_TILES == 16 || N_TILES == 17,
                "N is 32, 40, 64, 72, 128 or 136");
  if constexpr (N_TILES == 4) FA_WGMMA_RS("32", FA_R16_0, "%16, %17, %18, %19", "%20", "%21", FA_D16(0));
  if constexpr (N_TILES == 5) FA_WGMMA_RS("40", FA_R16_0 ", %16, %17, %18, %19", "%20, %21, %22, %23", "%24", "%25", FA_D20(0));
  if constexpr (N_TILES == 8) FA_WGMMA_RS("64", FA_R32_0, FA_R4_32, "%36", "%37", FA_D32(0));
  if constexpr (N_TILES == 9) FA_WGMMA_RS("72", FA_R32_0 ", " FA_R4_32, "%36, %37, %38, %39", "%40", "%41", FA_D32(0), FA_D4(8));
  if constexpr (N_TILES == 16) FA_WGMMA_RS("128", FA_R32_0 ", " FA_R32_32, FA_R4_64, "%68", "%69", FA_D32(0), FA_D32(8));
  if constexpr (N_TILES == 17) {
    FA_WGMMA_RS("136", FA_R32_0 ", " FA_R32_32 ", " FA_R4_64, "%68, %69, %70, %71", "%72", "%73", FA_D32(0), FA_D32(8), FA_D4(16));
  }
}

#undef FA_D4
#undef FA_D16
#undef FA_D20
#undef FA_D32
#undef FA_R16_0
#undef FA_R32_0
#undef FA_R4_32
#undef FA_R16_32
#undef FA_R32_32
#undef FA_R4_64
#undef FA_R32_64
#undef FA_WGMMA_SS
#undef FA_WGMMA_RS

}  // namespace fa
