// Runs a kernel's source on the CPU: each thread of the grid is a fiber, and the instructions of Hopper that the kernel uses are
// functions of this folder's fa/*.cuh, under the same names as in kernels/include/fa.
//
// What a GPU may do in any order happens in a random order, which a seed determines: which thread runs, when a TMA copy arrives,
// and when a wgmma that was issued reads shared memory.  The destination of a copy is NaN from its issue until its arrival.  A
// barrier that is missing or has too many arrivals therefore gives a deadlock, an error, or a wrong result in most orders.
//
// It does not emulate weak memory, caches, or registers, and no time.
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
#include <random>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace emulator {

constexpr int WARP = 32, NAMED_BARRIERS = 16, EXCHANGED = 8;
constexpr size_t STACK_BYTES = 256 << 10, SMEM_BYTES = 228 << 10, SMEM_ALIGNMENT = 1024;

struct Fiber;
struct Block;

// A wgmma that was issued: d[64, N] (+)= a[64, 16] b[16, N], of which a warp computes 16 rows.
struct Wgmma {
  float* d;            // [N / 8][4], of this thread
  int n_tiles;
  bool accumulate, b_by_rows, is_fp16;
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
  std::vector<std::function<void()>> stores;     // TMA stores that have not read shared memory yet
};

struct Block {
  uint3 index = {};
  int threads = 0, running = 0;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* smem = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Rendezvous barriers[NAMED_BARRIERS];
  std::unordered_map<const void*, Mbarrier> mbarriers;
};

struct Grid {
  dim3 size, block_size;
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Fiber*> ready;
  std::vector<std::function<void()>> copies;  // TMA loads that have not arrived
  Fiber* running = nullptr;
  ucontext_t scheduler;
};

// What a test sets and reads.
struct Settings {
  uint64_t seed = 0;
  int sms = 2, resident_blocks = 8;
  double early = 0.5;  // the probability that a copy or a wgmma is executed as soon as it may be
  std::string error;
};

inline Settings& settings() {
  static Settings the_settings;
  return the_settings;
}

inline std::mt19937_64& random_bits() {
  static std::mt19937_64 bits;
  return bits;
}

inline bool happens(double probability) { return std::uniform_real_distribution<>()(random_bits()) < probability; }

inline Grid*& grid() {
  static Grid* current = nullptr;
  return current;
}

inline Fiber& fiber() { return *grid()->running; }
inline Block& block() { return *fiber().block; }
inline Warp& warp() { return block().warps[fiber().number / WARP]; }
inline int lane() { return fiber().number % WARP; }
inline unsigned char* block_smem() { return block().smem; }

// Ends the launch; the first error is kept.
[[noreturn]] inline void fail(const std::string& what) {
  if (settings().error.empty()) settings().error = what;
  setcontext(&grid()->scheduler);
  std::abort();
}

// Lets other threads run until something wakes this one.
inline void wait(std::vector<Fiber*>& waiting, const char* what) {
  Fiber& self = fiber();
  waiting.push_back(&self);
  self.waits_for = what;
  swapcontext(&self.context, &grid()->scheduler);
}

// Lets other threads run for a while.
inline void yield() { wait(grid()->ready, "its delay"); }

inline void wake(std::vector<Fiber*>& waiting) {
  for (Fiber* each : waiting) grid()->ready.push_back(each);
  waiting.clear();
}

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

inline void meet_at_barrier(int number, int threads, bool waits) {
  Rendezvous& barrier = block().barriers[number];
  if (waits) {
    meet(barrier, threads, "a named barrier", [] {});
  } else if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    wake(barrier.waiting);
  }
}

// -- mbarriers and TMA --------------------------------------------------------------------------------------------------------

inline void complete_if_done(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase ^= 1;
  wake(barrier.waiting);
}

inline Mbarrier& mbarrier_of(const void* address) {
  auto place = block().mbarriers.find(address);
  if (place == block().mbarriers.end()) fail("an mbarrier is used that was not initialised");
  return place->second;
}

inline void arrive(const void* address, uint32_t bytes) {
  Mbarrier& barrier = mbarrier_of(address);
  if (barrier.pending == 0) fail("an mbarrier gets more arrivals than its phase has");
  barrier.bytes += bytes;
  --barrier.pending;
  complete_if_done(barrier);
}

// What cuTensorMapEncodeTiled is told.
struct TensorMap {
  unsigned char* data;
  uint64_t sizes[4], stride_bytes[4];
  uint32_t box[4];
  uint32_t element_bytes;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "a tensor map must hold it");

inline TensorMap tensor_map_of(const CUtensorMap& map) {
  TensorMap result;
  std::memcpy(&result, &map, sizeof result);
  return result;
}

// The address with the 128-byte swizzle: bits 4 to 6 are XORed with bits 7 to 9.  Blocks begin at multiples of 1024.
inline unsigned char* swizzled(unsigned char* smem, size_t offset) { return smem + (offset ^ (offset >> 7 & 7) << 4); }

// Calls visit(address in global memory or nullptr outside of the tensor, address in shared memory) for each element of a box.
template <typename Visit>
void for_each_element(const TensorMap& map, const int (&first)[4], unsigned char* smem, size_t offset, Visit visit) {
  size_t element = 0;
  for (uint32_t w = 0; w < map.box[3]; ++w) {
    for (uint32_t z = 0; z < map.box[2]; ++z) {
      for (uint32_t y = 0; y < map.box[1]; ++y) {
        for (uint32_t x = 0; x < map.box[0]; ++x, ++element) {
          const int64_t at[4] = {first[0] + int64_t(x), first[1] + int64_t(y), first[2] + int64_t(z), first[3] + int64_t(w)};
          unsigned char* global = map.data;
          for (int d = 0; d < 4; ++d) {
            if (at[d] < 0 || at[d] >= int64_t(map.sizes[d])) global = nullptr;
            if (global) global += at[d] * map.stride_bytes[d];
          }
          visit(global, swizzled(smem, offset + element * map.element_bytes));
        }
      }
    }
  }
}

inline size_t smem_offset(const void* address) { return static_cast<const unsigned char*>(address) - block().smem; }

inline void load_box(void* to_smem, const CUtensorMap& tensor, const int (&first)[4], const void* mbarrier) {
  const TensorMap map = tensor_map_of(tensor);
  Mbarrier& barrier = mbarrier_of(mbarrier);
  unsigned char* smem = block().smem;
  const size_t offset = smem_offset(to_smem), bytes = size_t(map.box[0]) * map.box[1] * map.box[2] * map.box[3] * map.element_bytes;
  if (offset % 128 || offset + bytes > SMEM_BYTES) fail("a TMA copy has a wrong address in shared memory");
  std::memset(smem + offset, 0xff, bytes);  // NaN, until the copy arrives
  const int from[4] = {first[0], first[1], first[2], first[3]};
  grid()->copies.push_back([=, &barrier] {
    for_each_element(map, from, smem, offset, [&](const unsigned char* global, unsigned char* shared) {
      if (global) std::memcpy(shared, global, map.element_bytes); else std::memset(shared, 0, map.element_bytes);
    });
    barrier.bytes -= bytes;
    complete_if_done(barrier);
  });
}

inline void store_box(const CUtensorMap& tensor, const int (&first)[4], const void* from_smem) {
  const TensorMap map = tensor_map_of(tensor);
  unsigned char* smem = block().smem;
  const size_t offset = smem_offset(from_smem);
  const int to[4] = {first[0], first[1], first[2], first[3]};
  fiber().stores.push_back([=] {
    for_each_element(map, to, smem, offset, [&](unsigned char* global, const unsigned char* shared) {
      if (global) std::memcpy(global, shared, map.element_bytes);
    });
  });
  if (happens(settings().early)) fiber().stores.back()(), fiber().stores.pop_back();
}

inline void finish_stores(Fiber& self) {
  for (auto& store : self.stores) store();
  self.stores.clear();
}

// -- wgmma --------------------------------------------------------------------------------------------------------------------

inline float number(uint16_t bits, bool is_fp16) {
  if (is_fp16) return __half2float(__half(__half_raw{bits}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
}

// Element (k, n) of b, or with the same strides element (k, m) of a, of a matrix descriptor with 128-byte swizzle.
inline float element(const Block& owner, uint64_t descriptor, int k, int n, bool by_rows, bool is_fp16) {
  const size_t first = (descriptor & 0x3fff) << 4, next_columns = (descriptor >> 16 & 0x3fff) << 4;
  const size_t row = by_rows ? k : n, column = by_rows ? n : k;
  const size_t offset = (first + row * 128 + column / 64 * next_columns + column % 64 * 2) & 0x3ffff;
  uint16_t bits;
  std::memcpy(&bits, swizzled(owner.smem, offset), sizeof bits);
  return number(bits, is_fp16);
}

// Executes one wgmma for the 16 rows of a warp.
inline void execute(Block& owner, int first_thread, const std::vector<const Wgmma*>& of_lanes) {
  const Wgmma& any = *of_lanes[0];
  const int columns = any.n_tiles * 8, group_row = first_thread / WARP % 4 * 16;
  std::vector<float> a(16 * 16), b(16 * columns);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      const uint32_t* registers = of_lanes[row % 8 * 4 + k % 8 / 2]->a;
      const int index = row / 8 + k / 8 * 2;
      a[row * 16 + k] = registers ? number(registers[index] >> k % 2 * 16 & 0xffff, any.is_fp16)
                                  : element(owner, any.a_descriptor, k, group_row + row, false, any.is_fp16);
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < columns; ++n) b[k * columns + n] = element(owner, any.b_descriptor, k, n, any.b_by_rows, any.is_fp16);
  }
  std::vector<float> sums(columns);
  for (int row = 0; row < 16; ++row) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < columns; ++n) sums[n] += a[row * 16 + k] * b[k * columns + n];
    }
    for (int n = 0; n < columns; ++n) {
      float& d = of_lanes[row % 8 * 4 + n % 8 / 2]->d[n / 8 * 4 + row / 8 * 2 + n % 2];
      d = any.accumulate ? d + sums[n] : sums[n];
    }
  }
}

// Executes the committed groups of a warp, except the latest `pending` ones.
inline void execute_groups(Block& owner, int first_thread, size_t pending) {
  Fiber* lanes[WARP];
  for (int i = 0; i < WARP; ++i) lanes[i] = owner.fibers[first_thread + i].get();
  while (lanes[0]->wgmma_groups.size() > pending) {
    for (size_t i = 0; i < lanes[0]->wgmma_groups[0].size(); ++i) {
      std::vector<const Wgmma*> of_lanes;
      for (Fiber* each : lanes) of_lanes.push_back(&each->wgmma_groups[0][i]);
      execute(owner, first_thread, of_lanes);
    }
    for (Fiber* each : lanes) each->wgmma_groups.erase(each->wgmma_groups.begin());
  }
}

inline void commit_wgmma() {
  Fiber& self = fiber();
  self.wgmma_groups.push_back(std::move(self.wgmmas));
  self.wgmmas.clear();
  const int first = self.number / WARP * WARP;
  meet_warp("wgmma.commit_group of its warp", [&, first] {
    if (happens(settings().early)) execute_groups(block(), first, 0);
  });
}

inline void wait_for_wgmma(size_t pending) {
  const int first = fiber().number / WARP * WARP;
  meet_warp("wgmma.wait_group of its warp", [&, first] { execute_groups(block(), first, pending); });
}

// -- a launch -----------------------------------------------------------------------------------------------------------------

inline void run_thread() {
  grid()->kernel();
  Fiber& self = fiber();
  finish_stores(self);
  --self.block->running;
  self.waits_for = nullptr;
  setcontext(&grid()->scheduler);
}

inline void start_block(uint64_t number) {
  Grid& all = *grid();
  auto block = std::make_unique<Block>();
  block->index = {unsigned(number % all.size.x), unsigned(number / all.size.x % all.size.y), unsigned(number / all.size.x / all.size.y)};
  block->threads = block->running = all.block_size.x * all.block_size.y * all.block_size.z;
  block->memory = std::make_unique<unsigned char[]>(SMEM_BYTES + SMEM_ALIGNMENT);
  block->smem = block->memory.get() + (SMEM_ALIGNMENT - reinterpret_cast<uintptr_t>(block->memory.get()) % SMEM_ALIGNMENT);
  std::memset(block->smem, 0xff, SMEM_BYTES);  // NaN
  block->warps.resize((block->threads + WARP - 1) / WARP);
  for (int i = 0; i < block->threads; ++i) {
    auto self = std::make_unique<Fiber>();
    self->block = block.get();
    self->number = i;
    self->thread = {i % all.block_size.x, i / all.block_size.x % all.block_size.y, i / all.block_size.x / all.block_size.y};
    self->stack.reset(new char[STACK_BYTES]);  // not initialised: most of it is never used
    getcontext(&self->context);
    self->context.uc_stack.ss_sp = self->stack.get();
    self->context.uc_stack.ss_size = STACK_BYTES;
    self->context.uc_link = nullptr;
    makecontext(&self->context, run_thread, 0);
    all.ready.push_back(self.get());
    block->fibers.push_back(std::move(self));
  }
  all.blocks.push_back(std::move(block));
}

inline std::string deadlock() {
  std::string text = "deadlock:";
  for (const auto& each : grid()->blocks) {
    std::unordered_map<std::string, int> counts;
    for (const auto& thread : each->fibers) {
      if (thread->waits_for) ++counts["warp " + std::to_string(thread->number / WARP) + " for " + thread->waits_for];
    }
    for (const auto& [what, count] : counts) text += " [block " + std::to_string(each->index.x) + ": " + std::to_string(count) + " threads of " + what + "]";
  }
  return text;
}

template <typename Queue>
auto take_any(Queue& queue) {
  std::swap(queue[random_bits()() % queue.size()], queue.back());
  auto taken = std::move(queue.back());
  queue.pop_back();
  return taken;
}

// Runs threads and copies in a random order until all blocks have ended.
inline void run_grid() {
  Grid& all = *grid();
  uint64_t started = 0, blocks = uint64_t(all.size.x) * all.size.y * all.size.z;
  int resident = 0;
  while (settings().error.empty()) {
    for (; started < blocks && resident < settings().resident_blocks; ++resident) start_block(started++);
    if (!all.copies.empty() && (all.ready.empty() || happens(settings().early / 8))) {
      take_any(all.copies)();
    } else if (!all.ready.empty()) {
      all.running = take_any(all.ready);
      swapcontext(&all.scheduler, &all.running->context);
      if (Block& ended = *all.running->block; ended.running == 0) ended.fibers.clear(), --resident;
    } else if (resident > 0) {
      settings().error = deadlock();
    } else {
      return;
    }
  }
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 size, dim3 block_size, size_t, cudaStream_t, const Arguments&... arguments) {
  Grid all;
  all.size = size;
  all.block_size = block_size;
  all.kernel = [&] { kernel(arguments...); };
  grid() = &all;
  run_grid();
  grid() = nullptr;
}

}  // namespace emulator

// -- what CUDA C++ has without a header ------------------------------------------------------------------------------------------

#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (emulator::fiber().thread)
#define blockIdx (emulator::block().index)
#define gridDim (emulator::grid()->size)
#define blockDim (emulator::grid()->block_size)

using std::max;
using std::min;

inline void __syncthreads() { emulator::meet_at_barrier(0, emulator::block().threads, true); }
inline void __syncwarp() { emulator::meet_warp("__syncwarp of its warp", [] {}); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) {
  for (int i = 0; i < 50; ++i) emulator::yield();
}
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
inline float __fdividef(float x, float y) { return x / y; }

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
