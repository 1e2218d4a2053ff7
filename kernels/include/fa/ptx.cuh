// Wrappers of PTX instructions, named after their instruction.  Each comment begins with the section of the PTX ISA.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace fa {

// Returns the 32-bit address of `pointer` in the shared state space of PTX.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 9.7.9.25.3.1 cp.async: copies 16 bytes from global to shared memory, bypassing L1; writes zeros if not `valid`.
__device__ __forceinline__ void cp_async_16_or_zero(void* to_smem, const void* from_gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(smem_address(to_smem)), "l"(from_gmem), "r"(valid ? 16 : 0) : "memory");
}

// 9.7.9.25.3.1 cp.async: the same for 4 bytes.
__device__ __forceinline__ void cp_async_4_or_zero(void* to_smem, const void* from_gmem, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"(smem_address(to_smem)), "l"(from_gmem), "r"(valid ? 4 : 0) : "memory");
}

// 9.7.9.25.3.2 cp.async.commit_group: combines the copies of this thread since the previous commit into one group.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// 9.7.9.25.3.3 cp.async.wait_group: waits for all but the latest PENDING groups; their data is then visible to this thread.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// 9.7.9.25.3.3 cp.async.wait_all: waits for all copies of this thread; their data is then visible to this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 9.7.13.15.15 cp.async.mbarrier.arrive: makes one expected arrival when all earlier copies of this thread are complete.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t* barrier_smem) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(smem_address(barrier_smem)) : "memory");
}

// 9.7.13.15.9 mbarrier.init: initialises the mbarrier; each phase completes after `arrivals` arrivals.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier_smem, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(smem_address(barrier_smem)), "r"(arrivals) : "memory");
}

// 9.7.13.15.13 mbarrier.arrive: arrives, and releases the earlier memory accesses of this thread.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier_smem) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" :: "r"(smem_address(barrier_smem)) : "memory");
}

// 9.7.13.15.16 mbarrier.test_wait: whether the phase of this parity has completed; if so, it acquires what the arrivals
// released.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier_smem, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(smem_address(barrier_smem)), "r"(parity) : "memory");
  return done;
}

// 9.7.13.1 barrier.sync: waits at named barrier NUMBER for THREADS threads. __syncthreads uses barrier 0.
template <int NUMBER, int THREADS>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("barrier.sync %0, %1;" :: "n"(NUMBER), "n"(THREADS) : "memory");
}

// 9.7.13.1 barrier.sync: the same, with a barrier number known only at run time.
template <int THREADS>
__device__ __forceinline__ void barrier_sync(int number) {
  asm volatile("barrier.sync %0, %1;" :: "r"(number), "n"(THREADS) : "memory");
}

// 9.7.13.1 barrier.arrive: arrives at the barrier like barrier.sync, but does not wait.
template <int THREADS>
__device__ __forceinline__ void barrier_arrive(int number) {
  asm volatile("barrier.arrive %0, %1;" :: "r"(number), "n"(THREADS) : "memory");
}

// 9.7.13.15.13 mbarrier.arrive.expect_tx: arrives, and makes the phase wait for `bytes` more bytes of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier_smem, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(smem_address(barrier_smem)), "r"(bytes) : "memory");
}

// 9.7.13.15.16 mbarrier.try_wait: as test_wait, but may suspend the thread for a limited time.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier_smem, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(smem_address(barrier_smem)), "r"(parity) : "memory");
  return done;
}

// 9.7.13.4 fence.mbarrier_init: releases the mbarrier initialisations of this thread to the threads of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// 9.7.13.3 barrier.cluster.arrive: arrives at the cluster barrier, and releases earlier memory accesses.  For whole warps only.
__device__ __forceinline__ void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// 9.7.13.3 barrier.cluster.arrive.relaxed: the same without the release, for use after fence.mbarrier_init.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// 9.7.13.3 barrier.cluster.wait: waits until all threads of the cluster have arrived, and acquires what they released.
__device__ __forceinline__ void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// 9.7.9.23 mapa: returns the address, in block `rank` of the cluster, that corresponds to shared memory `address` of this
// block.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t peer_address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer_address) : "r"(address), "r"(rank));
  return peer_address;
}

// 9.7.9.12 st.async: stores 16 bytes to another block's shared memory; the mbarrier at `barrier_address` there counts the
// bytes.
__device__ __forceinline__ void st_async(uint32_t address, uint4 value, uint32_t barrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier_address) : "memory");
}

// 9.7.9.12 st.async: the same with four floats.
__device__ __forceinline__ void st_async(uint32_t address, float4 value, uint32_t barrier_address) {
  const uint4 bits = make_uint4(__float_as_uint(value.x), __float_as_uint(value.y), __float_as_uint(value.z), __float_as_uint(value.w));
  st_async(address, bits, barrier_address);
}

// 9.7.9.12 st.async: the same with 8 bytes.
__device__ __forceinline__ void st_async(uint32_t address, float2 value, uint32_t barrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               :: "r"(address), "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(barrier_address) : "memory");
}

// 9.7.9.8 ld.relaxed: loads 16 bytes that another block may be storing, all of them from the same store.
__device__ __forceinline__ ulonglong2 ld_relaxed_gpu(const ulonglong2* pointer_gmem) {
  ulonglong2 value;
  asm volatile("{ .reg .b128 bits; ld.relaxed.gpu.global.b128 bits, [%2]; mov.b128 {%0, %1}, bits; }"
               : "=l"(value.x), "=l"(value.y) : "l"(pointer_gmem) : "memory");
  return value;
}

// 9.7.9.11 st.relaxed: stores 16 bytes that another block may be loading.
__device__ __forceinline__ void st_relaxed_gpu(ulonglong2* pointer_gmem, ulonglong2 value) {
  asm volatile("{ .reg .b128 bits; mov.b128 bits, {%1, %2}; st.relaxed.gpu.global.b128 [%0], bits; }"
               :: "l"(pointer_gmem), "l"(value.x), "l"(value.y) : "memory");
}

// 9.7.14.5.15 ldmatrix: loads four 8x8 matrices of 16-bit elements.  Lane i passes the address of row i % 8 of matrix i / 8.
// It receives elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row_address) : "memory");
}

// 9.7.14.5.15 ldmatrix.trans: the same, transposed: a lane receives two adjacent elements of a column in memory.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row_address) : "memory");
}

// 9.7.14.5.14 mma: d[16, 8] += a[16, 16] b[16, 8], with row-major a and column-major b.  Lane i holds elements 2 (i % 4) and
// 2 (i % 4) + 1 of rows i / 4 and i / 4 + 8 of d.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>, "T must be __half or __nv_bfloat16");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 9.7.9.21 cvt: rounds two floats to 16 bits each and packs them, with `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t cvt_rn_x2(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>, "T must be __half or __nv_bfloat16");
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// 9.7.9.21 cvt: converts four numbers in e4m3, exactly, to two pairs in fp16.  Each conversion reads its half of the register, without
// a shift.
__device__ __forceinline__ uint2 e4m3_to_halves(uint32_t four) {
  uint2 pairs;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs.x), "=r"(pairs.y) : "r"(four));
  return pairs;
}

// 9.7.3.21 ex2: 2^x with a relative error of at most 2^-22.  Results below 2^-126, and 2^-inf, are 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace fa
