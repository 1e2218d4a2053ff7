// The emulator, and the functions of the CUDA runtime and driver that a launcher calls.
#include "emulator.h"

#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace emulator {

Settings& settings() {
  static Settings the_settings;
  return the_settings;
}

Grid*& grid() {
  static Grid* current = nullptr;
  return current;
}

namespace {

std::mt19937_64& random_bits() {
  static std::mt19937_64 bits;
  return bits;
}

bool happens(double probability) { return std::uniform_real_distribution<>()(random_bits()) < probability; }

// Ends the launch; the first error is kept.
[[noreturn]] void fail(const std::string& what) {
  if (settings().error.empty()) settings().error = what;
  setcontext(&grid()->scheduler);
  std::abort();
}

}  // namespace

// -- threads that wait ----------------------------------------------------------------------------------------------------------

void wait(std::vector<Fiber*>& waiting, const char* what) {
  Fiber& self = fiber();
  waiting.push_back(&self);
  self.waits_for = what;
  swapcontext(&self.context, &grid()->scheduler);
}

void yield() { wait(grid()->ready, "its delay"); }

void poll() { wait(grid()->polling, "a store of another thread"); }

void wake(std::vector<Fiber*>& waiting) {
  for (Fiber* each : waiting) grid()->ready.push_back(each);
  waiting.clear();
}

void meet_at_barrier(int number, int threads, bool waits) {
  Rendezvous& barrier = block().barriers[number];
  if (waits) {
    meet(barrier, threads, "a named barrier", [] {});
  } else if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    wake(barrier.waiting);
  }
}

// -- mbarriers and TMA ----------------------------------------------------------------------------------------------------------

namespace {

void complete_if_done(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase ^= 1;
  wake(barrier.waiting);
}

}  // namespace

Mbarrier& mbarrier_of(const void* address, Block& owner) {
  auto place = owner.mbarriers.find(address);
  if (place == owner.mbarriers.end()) fail("an mbarrier is used that was not initialised");
  return place->second;
}

void arrive(const void* address, uint32_t bytes) {
  Mbarrier& barrier = mbarrier_of(address, block());
  if (barrier.pending == 0) fail("an mbarrier gets more arrivals than its phase has");
  barrier.bytes += bytes;
  --barrier.pending;
  complete_if_done(barrier);
}

namespace {

TensorMap tensor_map_of(const CUtensorMap& map) {
  TensorMap result;
  std::memcpy(&result, &map, sizeof result);
  return result;
}

// The address with a swizzle of 32, 64 or 128 bytes: one, two or three bits from bit 4 on are XORed with those from bit 7 on.
// Blocks begin at multiples of 1024.
unsigned char* swizzled(unsigned char* smem, size_t offset, size_t span_bytes) {
  return smem + (offset ^ (offset >> 7 & (span_bytes / 16 - 1)) << 4);
}

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
          visit(global, swizzled(smem, offset + element * map.element_bytes, map.span_bytes));
        }
      }
    }
  }
}

}  // namespace

// Loads a box into this block, or to the same place in another block of the cluster.
void load_box(void* to_smem, const CUtensorMap& tensor, const int (&first)[4], const void* mbarrier, Block& owner) {
  const TensorMap map = tensor_map_of(tensor);
  Mbarrier& barrier = mbarrier_of(owner.smem + smem_offset(mbarrier), owner);
  unsigned char* smem = owner.smem;
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

// Loads contiguous bytes into this block.
void load_bytes(void* to_smem, const void* from_gmem, size_t bytes, const void* mbarrier) {
  Mbarrier& barrier = mbarrier_of(mbarrier, block());
  if (bytes % 16 || smem_offset(to_smem) % 16 || reinterpret_cast<uintptr_t>(from_gmem) % 16) fail("a bulk copy is not aligned");
  std::memset(to_smem, 0xff, bytes);  // NaN, until the copy arrives
  grid()->copies.push_back([=, &barrier] {
    std::memcpy(to_smem, from_gmem, bytes);
    barrier.bytes -= bytes;
    complete_if_done(barrier);
  });
}

void store_box(const CUtensorMap& tensor, const int (&first)[4], const void* from_smem) {
  if (*std::min_element(first, first + 4) < 0) fail("a TMA store begins before its tensor");  // a GPU ends the kernel
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

// Reads shared memory at any time until finish_stores, and adds that to global memory at any time until finish_additions.
void add_floats(float* to_gmem, const float* from_smem, size_t count) {
  Fiber& self = fiber();
  self.stores.push_back([=, &self] {
    self.additions.push_back([=, values = std::vector<float>(from_smem, from_smem + count)] {
      for (size_t i = 0; i < count; ++i) to_gmem[i] += values[i];
    });
    if (happens(settings().early)) self.additions.back()(), self.additions.pop_back();
  });
  if (happens(settings().early)) self.stores.back()(), self.stores.pop_back();
}

namespace {

void finish(std::vector<Action>& actions) {
  for (Action& each : actions) each();
  actions.clear();
}

}  // namespace

void finish_stores() { finish(fiber().stores); }

void finish_additions() {
  finish_stores();
  finish(fiber().additions);
}

// -- cp.async -------------------------------------------------------------------------------------------------------------------

void copy_async(void* to_smem, const void* from_gmem, size_t bytes, bool is_valid) {
  std::memset(to_smem, 0xff, bytes);  // NaN, until the copy is complete
  fiber().copies.push_back([=] {
    if (is_valid) std::memcpy(to_smem, from_gmem, bytes); else std::memset(to_smem, 0, bytes);
  });
}

void complete_copies(size_t pending) {
  auto& groups = fiber().copy_groups;
  while (groups.size() > pending) {
    for (Action& copy : groups[0]) copy();
    groups.erase(groups.begin());
  }
}

void commit_copies() {
  Fiber& self = fiber();
  self.copy_groups.push_back(std::move(self.copies));
  self.copies.clear();
  if (happens(settings().early)) complete_copies(0);
}

// -- clusters -------------------------------------------------------------------------------------------------------------------

void arrive_at_cluster() {
  Cluster& cluster = *block().cluster;
  fiber().cluster_phase = cluster.phase;
  if (++cluster.arrived < cluster.threads) return;
  cluster.arrived = 0;
  ++cluster.phase;
  wake(cluster.waiting);
}

void wait_for_cluster() {
  Cluster& cluster = *block().cluster;
  if (cluster.phase == fiber().cluster_phase) wait(cluster.waiting, "the barrier of its cluster");
}

namespace {

Block& block_of(uint32_t address) {
  const uint32_t rank = address >> RANK_SHIFT;
  return rank == 0 ? block() : *block().cluster->blocks.at(rank - 1);
}

uint32_t without_rank(uint32_t address) { return address & ((1u << RANK_SHIFT) - 1); }

}  // namespace

// Stores to a block of the cluster, at any later time; the mbarrier there counts the bytes.
void store_async(uint32_t address, const void* value, size_t bytes, uint32_t barrier_address) {
  Block& owner = block_of(address);
  Mbarrier& barrier = mbarrier_of(owner.smem + without_rank(barrier_address), owner);
  unsigned char* const to_smem = owner.smem + without_rank(address);
  const std::string bits(static_cast<const char*>(value), bytes);
  grid()->copies.push_back([=, &owner, &barrier] {
    if (owner.running == 0 && settings().error.empty()) settings().error = "a block stores to a block that has ended";
    std::memcpy(to_smem, bits.data(), bytes);
    barrier.bytes -= bytes;
    complete_if_done(barrier);
  });
}

// -- matrices -------------------------------------------------------------------------------------------------------------------

namespace {

float number(uint32_t bits, Number type) {
  if (type == E4M3) return __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(bits), __NV_E4M3)));
  if (type == FP16) return __half2float(__half(__half_raw{uint16_t(bits)}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{uint16_t(bits)}));
}

// Element (k, n) of b, or with the same strides element (k, m) of a, of a matrix descriptor.  Its two highest bits are the swizzle.
float element(const Block& owner, uint64_t descriptor, int k, int n, bool by_rows, Number type) {
  const size_t first = (descriptor & 0x3fff) << 4, next_columns = (descriptor >> 16 & 0x3fff) << 4;
  const size_t span_bytes = 256 >> (descriptor >> 62), span = span_bytes / bytes_of(type);
  const size_t row = by_rows ? k : n, column = by_rows ? n : k;
  const size_t offset = (first + row * span_bytes + column / span * next_columns + column % span * bytes_of(type)) & 0x3ffff;
  uint32_t bits = 0;
  std::memcpy(&bits, swizzled(owner.smem, offset, span_bytes), bytes_of(type));
  return number(bits, type);
}

int exponent_of(float x, int of_zero) { return x == 0.0f ? of_zero : std::ilogb(x); }

// The sum of d and 32 products of e4m3 numbers, as Hopper adds them: tests/unit/judge/e4m3_sums.py describes the model.
float sum_of_13_bits(float d, const float* a, const float* b, int b_stride) {
  constexpr int TERMS = 32, KEPT_BITS = 13, SMALLEST_EXPONENT = -6, OF_ZERO = -120;
  int largest = exponent_of(d, OF_ZERO);
  for (int k = 0; k < TERMS; ++k) {
    const float x = a[k], y = b[k * b_stride];
    if (std::isnan(x) || std::isnan(y)) return NAN;
    if (x != 0.0f && y != 0.0f) {
      largest = std::max(largest, std::max(std::ilogb(x), SMALLEST_EXPONENT) + std::max(std::ilogb(y), SMALLEST_EXPONENT));
    }
  }
  if (!std::isfinite(d) || largest == OF_ZERO) return d;
  const double unit = std::ldexp(1.0, KEPT_BITS - largest);
  double total = std::trunc(d * unit);
  for (int k = 0; k < TERMS; ++k) total += std::trunc(double(a[k]) * b[k * b_stride] * unit);
  const float sum = float(total / unit);  // exact: 33 numbers of at most 16 bits
  uint32_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  bits &= ~((1u << (23 - KEPT_BITS)) - 1);
  float kept;
  std::memcpy(&kept, &bits, sizeof kept);
  return kept;
}

// Executes one wgmma for the 16 rows of a warp.
void execute(Block& owner, int first_thread, const std::vector<const Wgmma*>& of_lanes) {
  const Wgmma& any = *of_lanes[0];
  const int columns = any.n_tiles * 8, group_row = first_thread / WARP % 4 * 16, in_register = 4 / bytes_of(any.type);
  const int terms = 8 * in_register, bits = 32 / in_register;
  std::vector<float> a(16 * terms), b(terms * columns);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < terms; ++k) {
      const uint32_t* registers = of_lanes[row % 8 * 4 + k % (terms / 2) / in_register]->a;
      const int index = row / 8 + k / (terms / 2) * 2;
      a[row * terms + k] = registers ? number(registers[index] >> k % in_register * bits & ((1u << bits) - 1), any.type)
                                     : element(owner, any.a_descriptor, k, group_row + row, false, any.type);
    }
  }
  for (int k = 0; k < terms; ++k) {
    for (int n = 0; n < columns; ++n) b[k * columns + n] = element(owner, any.b_descriptor, k, n, any.b_by_rows, any.type);
  }
  std::vector<float> sums(columns);
  for (int row = 0; row < 16; ++row) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int k = 0; k < terms && any.type != E4M3; ++k) {
      for (int n = 0; n < columns; ++n) sums[n] += a[row * terms + k] * b[k * columns + n];
    }
    for (int n = 0; n < columns; ++n) {
      float& d = of_lanes[row % 8 * 4 + n % 8 / 2]->d[n / 8 * 4 + row / 8 * 2 + n % 2];
      const float before = any.accumulate ? d : 0.0f;
      d = any.type == E4M3 ? sum_of_13_bits(before, &a[row * terms], &b[n], columns) : before + sums[n];
    }
  }
}

// Executes the committed groups of a warp, except the latest `pending` ones.
void execute_groups(Block& owner, int first_thread, size_t pending) {
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

}  // namespace

void commit_wgmma() {
  Fiber& self = fiber();
  self.wgmma_groups.push_back(std::move(self.wgmmas));
  self.wgmmas.clear();
  const int first = self.number / WARP * WARP;
  meet_warp("wgmma.commit_group of its warp", [&, first] {
    if (happens(settings().early)) execute_groups(block(), first, 0);
  });
}

void wait_for_wgmma(size_t pending) {
  const int first = fiber().number / WARP * WARP;
  meet_warp("wgmma.wait_group of its warp", [&, first] { execute_groups(block(), first, pending); });
}

void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Number type) {
  const auto* values = exchange({a[0], a[1], a[2], a[3], b0, b1});
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t of_a = values[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], of_b = values[column * 4 + k % 8 / 2][4 + k / 8];
      sum += number(of_a >> k % 2 * 16 & 0xffff, type) * number(of_b >> k % 2 * 16 & 0xffff, type);
    }
    d[i] += sum;
  }
}

// -- a launch -------------------------------------------------------------------------------------------------------------------

namespace {

void run_thread() {
  grid()->kernel();
  Fiber& self = fiber();
  finish_additions();
  --self.block->running;
  self.waits_for = nullptr;
  setcontext(&grid()->scheduler);
}

Block* start_block(uint64_t number) {
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
  return all.blocks.back().get();
}

// Starts the next blocks that share a cluster.  Their numbers differ in x only.
void start_cluster(uint64_t first) {
  auto cluster = std::make_shared<Cluster>();
  for (int rank = 0; rank < grid()->cluster_size; ++rank) {
    Block* each = start_block(first + rank);
    each->cluster = cluster;
    cluster->blocks.push_back(each);
    cluster->threads += each->threads;
  }
}

std::string deadlock() {
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

}  // namespace

// Runs threads and copies in a random order until all blocks have ended.  Clusters start in their order with the seeds 0 and 1, and
// in a random one with others: CUDA promises none.
void run_grid() {
  Grid& all = *grid();
  std::vector<uint64_t> clusters(uint64_t(all.size.x) * all.size.y * all.size.z / all.cluster_size);
  std::iota(clusters.rbegin(), clusters.rend(), 0);  // the next one is the last
  if (settings().seed > 1) std::shuffle(clusters.begin(), clusters.end(), random_bits());
  int resident = 0;
  while (settings().error.empty()) {
    while (!clusters.empty() && (resident == 0 || resident + all.cluster_size <= settings().resident_blocks)) {
      start_cluster(clusters.back() * all.cluster_size);
      clusters.pop_back();
      resident += all.cluster_size;
    }
    if (!all.copies.empty() && (all.ready.empty() || happens(settings().early / 8))) {
      take_any(all.copies)();
    } else if (!all.ready.empty()) {
      all.running = take_any(all.ready);
      swapcontext(&all.scheduler, &all.running->context);
      if (Block& ended = *all.running->block; ended.running == 0) ended.fibers.clear(), --resident;
    } else if (!all.polling.empty() && all.polls++ < 2) {
      wake(all.polling);
    } else if (resident > 0) {
      settings().error = deadlock();
    } else {
      return;
    }
  }
}

}  // namespace emulator

namespace {

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                const cuuint64_t* stride_bytes, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const uint32_t element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const uint32_t span_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 32;
  const bool is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_32B || span_bytes > 32;
  if (rank != 4 || !is_swizzled || box[0] * element_bytes != span_bytes) return CUDA_ERROR_INVALID_VALUE;
  if (reinterpret_cast<uintptr_t>(data) % 16) return CUDA_ERROR_INVALID_VALUE;
  emulator::TensorMap result = {static_cast<unsigned char*>(data), {}, {element_bytes}, {}, element_bytes, span_bytes};
  for (int d = 0; d < 4; ++d) {
    if (d > 0) result.stride_bytes[d] = stride_bytes[d - 1];
    if (sizes[d] == 0 || box[d] == 0 || box[d] > 256 || (d > 0 && stride_bytes[d - 1] % 16)) return CUDA_ERROR_INVALID_VALUE;
    result.sizes[d] = sizes[d];
    result.box[d] = box[d];
  }
  std::memcpy(map, &result, sizeof result);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void emulator_set(uint64_t seed, int sms, int resident_blocks, double early) {
  emulator::settings() = {seed, sms, resident_blocks, early, ""};
  emulator::random_bits().seed(seed);
}
const char* emulator_error() { return emulator::settings().error.c_str(); }
const char* emulator_launched() { return emulator::settings().launched.c_str(); }

// The number of the device is its number of SMs, because launchers keep what they know of a device.
cudaError_t cudaGetDevice(int* device) { return *device = emulator::settings().sms, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? device : 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->numRegs = 255;  // as many as a thread can have
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() { return emulator::settings().error.empty() ? cudaSuccess : cudaErrorLaunchFailure; }
cudaError_t cudaGetLastError() { return cudaPeekAtLastError(); }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(&encode);
  return cudaSuccess;
}

}  // extern "C"
