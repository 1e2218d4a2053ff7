// Wrappers of PTX instructions of sm_90a that backward kernels use.  Each comment begins with the section of the PTX ISA.
#pragma once

#include "fa/warpgroup.cuh"

namespace fa {

// 9.7.9.25.5.2 cp.async.bulk: copies contiguous bytes, a multiple of 16, to the shared memory of this block.
__device__ __forceinline__ void cp_async_bulk(void* to_smem, const void* from_gmem, uint32_t bytes, uint64_t* barrier_smem) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(smem_address(to_smem)), "l"(from_gmem), "r"(bytes), "r"(smem_address(barrier_smem)) : "memory");
}

// 9.7.9.25.5.3 cp.reduce.async.bulk: adds contiguous floats of shared memory to global memory, each of them atomically.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* to_gmem, const float* from_smem, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to_gmem), "r"(smem_address(from_smem)), "r"(bytes) : "memory");
}

// 9.7.9.25.4.2 cp.async.bulk.wait_group: waits until the bulk operations of this thread are complete, and their writes visible to it.
__device__ __forceinline__ void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// 9.7.13.4 fence.proxy.async: orders the accesses of global memory that this thread has seen before its next bulk operations.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// 9.7.9.8 ld.acquire: loads an integer; what the thread that stored it wrote before is visible afterwards.
__device__ __forceinline__ int ld_acquire(const int* from_gmem) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from_gmem) : "memory");
  return value;
}

// 9.7.9.11 st.release: stores an integer after all that this thread has written and seen.
__device__ __forceinline__ void st_release(int* to_gmem, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(to_gmem), "r"(value) : "memory");
}

// 9.7.13.5 atom: adds to an integer in global memory, and returns what it was.
__device__ __forceinline__ int atom_add(int* to_gmem, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to_gmem), "r"(value) : "memory");
  return before;
}

// 9.7.13.6 red: adds four floats to global memory, each of them atomically.
__device__ __forceinline__ void red_add_x4(float* to_gmem, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(to_gmem), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// 9.7.14.5.16 stmatrix.trans: stores four 8x8 matrices transposed: lane i passes the address of column i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t column_address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(column_address), "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3]) : "memory");
}

}  // namespace fa
