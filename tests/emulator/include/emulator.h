// Runs a kernel's source on the CPU: each thread of the grid is a fiber, and the instructions of Hopper that the kernel uses are
// functions of this folder's fa/*.cuh, under the same names as in kernels/include/fa.
//
// What a GPU may do in any order happens in a random order, which a seed determines: which thread runs, when a TMA copy arrives,
// and when a wgmma that was issued reads shared memory.  The destination of a copy is NaN from its issue until its arrival.  A
// barrier that is missing or has too many arrivals therefore gives a deadlock, an error, or a wrong result in most orders.
//
// The blocks of a cluster are resident together.  It does not emulate weak memory, caches, or registers, and no time.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <math_constants.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emulator {

constexpr int WARP = 32, NAMED_BARRIERS = 16, EXCHANGED = 8;
constexpr uint32_t RANK_SHIFT = 24;  // of an address in a cluster: the rank of its block, plus one; 0 is this block
constexpr size_t STACK_BYTES = 256 << 10, SMEM_BYTES = 228 << 10, SMEM_ALIGNMENT = 1024;

struct Fiber;
struct Block;
using Action = std::function<void()>;

enum Number { FP16, BF16, E4M3 };
constexpr int bytes_of(Number type) { return type == E4M3 ? 1 : 2; }

// A wgmma that was issued: d[64, N] (+)= a[64, K] b[K, N], of which a warp computes 16 rows.  K has 32 bytes.
struct Wgmma {
  float* d;            // [N / 8][4], of this thread
  int n_tiles;
  bool accumulate, b_by_rows;
  Number type;
  const uint32_t* a;   // four registers of this thread, or nullptr if a is in shared memory
  uint64_t a_descriptor, b_descriptor;
};

// Where threads wait until enough of them have arrived.
struct Rendezvous {
  int arrived = 0;
  std::vector<Fiber*> waiting;
};

struct Mbarrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
};

struct Warp {
  Rendezvous rendezvous;
  uint32_t generation = 0;
  uint32_t values[2][WARP][EXCHANGED];
};

// One thread of the grid.
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  uint3 thread = {};
  int number = 0;  // of the thread in its block
  const char* waits_for = "";
  std::vector<std::vector<Wgmma>> wgmma_groups;  // committed, but not executed
  std::vector<Wgmma> wgmmas;                     // issued since the last commit
  std::vector<Action> stores;                    // TMA stores that have not read shared memory yet
  std::vector<Action> additions;                 // bulk reductions that have read it, but have not added yet
  std::vector<std::vector<Action>> copy_groups;  // cp.async: committed, but not complete
  std::vector<Action> copies;                    // the same, issued since the last commit
  uint32_t cluster_phase = 0;                    // of the cluster's barrier, when this thread arrived
};

// Where the threads of a cluster meet.
struct Cluster {
  std::vector<Block*> blocks;
  int threads = 0, arrived = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  uint3 index = {};
  int threads = 0, running = 0;
  std::shared_ptr<Cluster> cluster;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* smem = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Rendezvous barriers[NAMED_BARRIERS];
  std::unordered_map<const void*, Mbarrier> mbarriers;
};

struct Grid {
  dim3 size, block_size;
  int cluster_size = 1;  // in x
  Action kernel;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Fiber*> ready;
  std::vector<Fiber*> polling;  // threads that will load what another one may store
  int polls = 0;                // since the latest of these stores, how often they have loaded while nothing else could run
  std::vector<Action> copies;  // what arrives at any time: TMA loads, and stores to other blocks
  Fiber* running = nullptr;
  ucontext_t scheduler;
};

// What a test sets and reads.
struct Settings {
  uint64_t seed = 0;
  int sms = 2, resident_blocks = 8;
  double early = 0.5;  // the probability that a copy or a wgmma is executed as soon as it may be
  std::string error;
  std::string launched;  // the types of the parameters of the latest kernel
};

Settings& settings();
Grid*& grid();  // of the launch that runs

inline Fiber& fiber() { return *grid()->running; }
inline Block& block() { return *fiber().block; }
inline Warp& warp() { return block().warps[fiber().number / WARP]; }
inline int lane() { return fiber().number % WARP; }
inline unsigned char* block_smem() { return block().smem; }
inline size_t smem_offset(const void* address) { return static_cast<const unsigned char*>(address) - block().smem; }

// -- threads that wait ----------------------------------------------------------------------------------------------------------

void wait(std::vector<Fiber*>& waiting, const char* what);  // lets other threads run until something wakes this one
void wake(std::vector<Fiber*>& waiting);
void yield();  // lets other threads run for a while
void poll();   // lets other threads run until none can
void meet_at_barrier(int number, int threads, bool waits);

// The last of `count` threads to arrive runs `action`; the others wait for it.
template <typename Action>
void meet(Rendezvous& rendezvous, int count, const char* what, Action action) {
  if (++rendezvous.arrived == count) {
    rendezvous.arrived = 0;
    action();
    wake(rendezvous.waiting);
  } else {
    wait(rendezvous.waiting, what);
  }
}

template <typename Action>
void meet_warp(const char* what, Action action) {
  meet(warp().rendezvous, WARP, what, action);
}

// Gives the values of all lanes to all lanes.  A lane may be one exchange ahead of another, so there are two sets of values.
template <int COUNT>
const uint32_t (*exchange(const uint32_t (&own)[COUNT]))[EXCHANGED] {
  static_assert(COUNT <= EXCHANGED, "more values than a lane can exchange");
  Warp& self = warp();
  const uint32_t set = self.generation % 2;
  std::copy(own, own + COUNT, self.values[set][lane()]);
  meet_warp("the other lanes of its warp", [&] { ++self.generation; });
  return self.values[set];
}

// -- mbarriers, copies and matrices ---------------------------------------------------------------------------------------------

Mbarrier& mbarrier_of(const void* address, Block& owner);
void arrive(const void* mbarrier, uint32_t bytes);  // and lets the phase wait for `bytes` more bytes

// What cuTensorMapEncodeTiled is told.
struct TensorMap {
  unsigned char* data;
  uint64_t sizes[4], stride_bytes[4];
  uint32_t box[4];
  uint32_t element_bytes;
  uint32_t span_bytes;  // of the swizzle
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "a tensor map must hold it");

void load_box(void* to_smem, const CUtensorMap& map, const int (&first)[4], const void* mbarrier, Block& owner);
void load_bytes(void* to_smem, const void* from_gmem, size_t bytes, const void* mbarrier);
void store_box(const CUtensorMap& map, const int (&first)[4], const void* from_smem);
void add_floats(float* to_gmem, const float* from_smem, size_t count);
void finish_stores();
void finish_additions();

void copy_async(void* to_smem, const void* from_gmem, size_t bytes, bool is_valid);
void commit_copies();
void complete_copies(size_t pending);  // all but the latest `pending` groups of this thread

void arrive_at_cluster();
void wait_for_cluster();
inline uint32_t address_in(uint32_t address, uint32_t rank) { return address | (rank + 1) << RANK_SHIFT; }
void store_async(uint32_t address, const void* value, size_t bytes, uint32_t barrier_address);

void commit_wgmma();
void wait_for_wgmma(size_t pending);  // for all but the latest `pending` groups of this warp
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Number type);  // mma.m16n8k16

// -- a launch -------------------------------------------------------------------------------------------------------------------

void run_grid();

// The blocks per cluster of the next launch, for kernels with __cluster_dims__.
inline int& next_cluster_size() {
  static int size = 1;
  return size;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 size, dim3 block_size, size_t, cudaStream_t, const Arguments&... arguments) {
  settings().launched = __PRETTY_FUNCTION__;
  Grid all;
  all.size = size;
  all.block_size = block_size;
  all.cluster_size = std::exchange(next_cluster_size(), 1);
  all.kernel = [&] { kernel(arguments...); };
  grid() = &all;
  run_grid();
  grid() = nullptr;
}

}  // namespace emulator

// -- what CUDA C++ has without a header ------------------------------------------------------------------------------------------

#undef __launch_bounds__
#undef __cluster_dims__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

// A coordinate of the running thread.  No macro: launch configurations have members with the names of the variables below.
template <unsigned (*READ)()>
struct Coordinate {
  operator unsigned() const { return READ(); }
};
#define EMULATED_COORDINATES(NAME, VALUE)                                              \
  inline unsigned NAME##_x() { return (VALUE).x; }                                     \
  inline unsigned NAME##_y() { return (VALUE).y; }                                     \
  inline unsigned NAME##_z() { return (VALUE).z; }                                     \
  constexpr struct { Coordinate<NAME##_x> x; Coordinate<NAME##_y> y; Coordinate<NAME##_z> z; } NAME{};
EMULATED_COORDINATES(threadIdx, emulator::fiber().thread)
EMULATED_COORDINATES(blockIdx, emulator::block().index)
EMULATED_COORDINATES(gridDim, emulator::grid()->size)
EMULATED_COORDINATES(blockDim, emulator::grid()->block_size)
#undef EMULATED_COORDINATES

inline int min(int x, int y) { return std::min(x, y); }
inline int max(int x, int y) { return std::max(x, y); }
inline unsigned min(unsigned x, unsigned y) { return std::min(x, y); }
inline unsigned max(unsigned x, unsigned y) { return std::max(x, y); }
inline int64_t min(int64_t x, int64_t y) { return std::min(x, y); }
inline int64_t max(int64_t x, int64_t y) { return std::max(x, y); }

inline void __syncthreads() { emulator::meet_at_barrier(0, emulator::block().threads, true); }
inline void __syncwarp() { emulator::meet_warp("__syncwarp of its warp", [] {}); }
inline void __threadfence() { emulator::yield(); }  // other threads run before it and after it
inline void __nanosleep(unsigned) {
  for (int i = 0; i < 50; ++i) emulator::yield();
}
template <typename T>
T __ldg(const T* pointer) { return *pointer; }
template <typename T>
T __ldcg(const T* pointer) { return *pointer; }
template <typename T>
void __stcg(T* pointer, T value) { *pointer = value; }
inline int __float_as_int(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __int_as_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t __float_as_uint(float x) { return uint32_t(__float_as_int(x)); }
inline float __uint_as_float(uint32_t bits) { return __int_as_float(int(bits)); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return uint32_t(uint64_t(x) * y >> 32); }
inline int __vimax3_s32(int x, int y, int z) { return std::max(x, std::max(y, z)); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selectors) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> (selectors >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline float __fdividef(float x, float y) { return x / y; }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) emulator::next_cluster_size() = config->attrs[i].val.clusterDim.x;
  }
  emulator::launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, arguments...);
  return cudaPeekAtLastError();
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t* config) {
  *clusters = std::max(1, emulator::settings().sms / int(config->attrs[0].val.clusterDim.x));
  return cudaSuccess;
}

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  uint32_t own[1];
  std::memcpy(own, &value, 4);
  std::memcpy(&value, emulator::exchange(own)[source], 4);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) { return __shfl_sync(mask, value, emulator::lane() ^ bits); }
inline int __any_sync(unsigned, int predicate) {
  const auto* values = emulator::exchange({uint32_t(predicate != 0)});
  return std::any_of(values, values + emulator::WARP, [](const auto& of_lane) { return of_lane[0] != 0; });
}
