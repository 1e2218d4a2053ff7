// Wrappers of PTX instructions of sm_90a for persistent kernels with producer and consumer warpgroups.  Each comment begins with
// the section of the PTX ISA.
#pragma once

#include "fa/hopper.cuh"

namespace fa {

// 9.7.19.5 setmaxnreg.dec: gives registers of this warpgroup back, so that each thread keeps REGISTERS.  For whole warpgroups.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// 9.7.19.5 setmaxnreg.inc: waits until there are enough registers, so that each thread has REGISTERS.  For whole warpgroups.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// 9.7.14.5.16 stmatrix: stores four 8x8 matrices of 16-bit elements.  Lane i passes the address of row i % 8 of matrix i / 8, and
// holds elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4 of each matrix.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(row_address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// 9.7.9.27.1.2 cp.async.bulk.tensor: copies a box of shared memory to a 4D tensor.  Elements outside of the tensor are not
// written.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const CUtensorMap& map, int x, int y, int z, int w,
                                                              const void* from_smem) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
               :: "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(smem_address(from_smem)) : "memory");
}

// 9.7.9.25.4.1 cp.async.bulk.commit_group: combines the bulk stores of this thread since the previous commit into one group.
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// 9.7.9.25.4.2 cp.async.bulk.wait_group.read: waits until the bulk stores of this thread have read their shared memory.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// 9.7.15.5.2 wgmma.mma_async: the shapes that fa/hopper.cuh lacks.  N = 80, 96, 112, 160 and 192 with a in shared memory (Q K^T), and
// N = 72, 80, 96, 112, 192 and 256 with a in registers (P V).
#define FA_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FA_D8(i) FA_D4(i), FA_D4(i + 1)
#define FA_D16(i) FA_D8(i), FA_D8(i + 2)
#define FA_D32(i) FA_D16(i), FA_D16(i + 4)
#define FA_R32_0                                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_R4_32 "%32, %33, %34, %35"
#define FA_R8_32 FA_R4_32 ", %36, %37, %38, %39"
#define FA_R16_32 FA_R8_32 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FA_R24_32 FA_R16_32 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FA_R32_32 FA_R24_32 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_R16_64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FA_R32_64 FA_R16_64 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FA_R32_96                                                                                                       \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, " \
  "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// The operands after those of d: a, b, whether to accumulate.  Their numbers follow the last register of d.
#define FA_WGMMA_SS(N, TYPE, REGISTERS, A, B, ACCUMULATE, BY_ROWS, ...)                                                    \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE \
               " {" REGISTERS "}, " A ", " B ", p, 1, 1, 0, " BY_ROWS "; }"                                                     \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(int(accumulate)), "n"(B_BY_ROWS))
#define FA_WGMMA_SS_N80(TYPE) \
  FA_WGMMA_SS("80", TYPE, FA_R32_0 ", " FA_R8_32, "%40", "%41", "%42", "%43", FA_D32(0), FA_D8(8))
#define FA_WGMMA_SS_N96(TYPE) \
  FA_WGMMA_SS("96", TYPE, FA_R32_0 ", " FA_R16_32, "%48", "%49", "%50", "%51", FA_D32(0), FA_D16(8))
#define FA_WGMMA_SS_N112(TYPE) \
  FA_WGMMA_SS("112", TYPE, FA_R32_0 ", " FA_R24_32, "%56", "%57", "%58", "%59", FA_D32(0), FA_D16(8), FA_D8(12))
#define FA_WGMMA_SS_N160(TYPE)                                                                                                  \
  FA_WGMMA_SS("160", TYPE, FA_R32_0 ", " FA_R32_32 ", " FA_R16_64, "%80", "%81", "%82", "%83", FA_D32(0), FA_D32(8), FA_D16(16))
#define FA_WGMMA_SS_N192(TYPE) \
  FA_WGMMA_SS("192", TYPE, FA_R32_0 ", " FA_R32_32 ", " FA_R32_64, "%96", "%97", "%98", "%99", FA_D32(0), FA_D32(8), FA_D32(16))
#define FA_WGMMA_RS(N, TYPE, REGISTERS, A, B, ACCUMULATE, BY_ROWS, ...)                                                      \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE \
               " {" REGISTERS "}, {" A "}, " B ", p, 1, 1, " BY_ROWS "; }"                                                     \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(B_BY_ROWS))
#define FA_WGMMA_RS_N72(TYPE) \
  FA_WGMMA_RS("72", TYPE, FA_R32_0 ", " FA_R4_32, "%36, %37, %38, %39", "%40", "%41", "%42", FA_D32(0), FA_D4(8))
#define FA_WGMMA_RS_N80(TYPE) \
  FA_WGMMA_RS("80", TYPE, FA_R32_0 ", " FA_R8_32, "%40, %41, %42, %43", "%44", "%45", "%46", FA_D32(0), FA_D8(8))
#define FA_WGMMA_RS_N96(TYPE) \
  FA_WGMMA_RS("96", TYPE, FA_R32_0 ", " FA_R16_32, "%48, %49, %50, %51", "%52", "%53", "%54", FA_D32(0), FA_D16(8))
#define FA_WGMMA_RS_N112(TYPE) \
  FA_WGMMA_RS("112", TYPE, FA_R32_0 ", " FA_R24_32, "%56, %57, %58, %59", "%60", "%61", "%62", FA_D32(0), FA_D16(8), FA_D8(12))
#define FA_WGMMA_RS_N192(TYPE)                                                                                                   \
  FA_WGMMA_RS("192", TYPE, FA_R32_0 ", " FA_R32_32 ", " FA_R32_64, "%96, %97, %98, %99", "%100", "%101", "%102", FA_D32(0), FA_D32(8), \
              FA_D32(16))
#define FA_WGMMA_RS_N256(TYPE)                                                                                              \
  FA_WGMMA_RS("256", TYPE, FA_R32_0 ", " FA_R32_32 ", " FA_R32_64 ", " FA_R32_96, "%128, %129, %130, %131", "%132", "%133", \
              "%134", FA_D32(0), FA_D32(8), FA_D32(16), FA_D32(24))
#define FA_FOR_TYPE(WGMMA) \
  if constexpr (std::is_same_v<T, __half>) WGMMA("f16"); else WGMMA("bf16")

// The overloads of fa/hopper.cuh, with the tiles of d for more values of N.
template <typename T, int B_BY_ROWS, int N_TILES>
__device__ __forceinline__ void wgmma_any_n(float (&d)[N_TILES][4], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (N_TILES == 10) {
    FA_FOR_TYPE(FA_WGMMA_SS_N80);
  } else if constexpr (N_TILES == 12) {
    FA_FOR_TYPE(FA_WGMMA_SS_N96);
  } else if constexpr (N_TILES == 14) {
    FA_FOR_TYPE(FA_WGMMA_SS_N112);
  } else if constexpr (N_TILES == 20) {
    FA_FOR_TYPE(FA_WGMMA_SS_N160);
  } else if constexpr (N_TILES == 24) {
    FA_FOR_TYPE(FA_WGMMA_SS_N192);
  } else {
    wgmma_m64k16<T, B_BY_ROWS>(d, a, b, accumulate);
  }
}

template <typename T, int B_BY_ROWS, int N_TILES>
__device__ __forceinline__ void wgmma_any_n(float (&d)[N_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  if constexpr (N_TILES == 9) {
    FA_FOR_TYPE(FA_WGMMA_RS_N72);
  } else if constexpr (N_TILES == 10) {
    FA_FOR_TYPE(FA_WGMMA_RS_N80);
  } else if constexpr (N_TILES == 12) {
    FA_FOR_TYPE(FA_WGMMA_RS_N96);
  } else if constexpr (N_TILES == 14) {
    FA_FOR_TYPE(FA_WGMMA_RS_N112);
  } else if constexpr (N_TILES == 24) {
    FA_FOR_TYPE(FA_WGMMA_RS_N192);
  } else if constexpr (N_TILES == 32) {
    FA_FOR_TYPE(FA_WGMMA_RS_N256);
  } else {
    wgmma_m64k16<T, B_BY_ROWS>(d, a, b, accumulate);
  }
}

#undef FA_D4
#undef FA_D8
#undef FA_D16
#undef FA_D32
#undef FA_R32_0
#undef FA_R4_32
#undef FA_R8_32
#undef FA_R16_32
#undef FA_R24_32
#undef FA_R32_32
#undef FA_R16_64
#undef FA_R32_64
#undef FA_R32_96
#undef FA_WGMMA_SS
#undef FA_WGMMA_SS_N80
#undef FA_WGMMA_SS_N96
#undef FA_WGMMA_SS_N112
#undef FA_WGMMA_SS_N160
#undef FA_WGMMA_SS_N192
#undef FA_WGMMA_RS
#undef FA_WGMMA_RS_N72
#undef FA_WGMMA_RS_N80
#undef FA_WGMMA_RS_N96
#undef FA_WGMMA_RS_N112
#undef FA_WGMMA_RS_N192
#undef FA_WGMMA_RS_N256
#undef FA_FOR_TYPE

}  // namespace fa
