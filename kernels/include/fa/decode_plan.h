// How the host splits the keys of a tile over the blocks of a cluster, and over clusters.
#pragma once

#include <algorithm>
#include <atomic>

#include "fa/decode_tiles.h"
#include "fa/launch.h"

namespace fa {

constexpr int NARROW = 4, WIDE = 8;  // warps per block: an SM holds two narrow blocks or one wide block
constexpr int MAX_CLUSTER_LOG2 = 4;  // blocks per cluster; 16 needs cudaFuncAttributeNonPortableClusterSizeAllowed
constexpr int MAX_CLUSTERS = 16;     // clusters per tile

// Launches a kernel with clusters of any size up to 16.
template <auto KERNEL, int WARPS, int SMEM_BYTES>
struct ClusterLauncher {
  static int set_up(const FaForwardArgs* args) {
    static OncePerDevice once;
    return once([&] {
      const auto* function = reinterpret_cast<const void*>(KERNEL);
      if (int error = fa_allow_dynamic_smem(args, function, SMEM_BYTES)) return error;
      return static_cast<int>(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    });
  }

  static cudaLaunchConfig_t config(dim3 grid, int cluster_log2, cudaLaunchAttribute* cluster) {
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = 1u << cluster_log2, cluster->val.clusterDim.y = 1, cluster->val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(WARPS * WARP);
    config.dynamicSmemBytes = SMEM_BYTES;
    config.attrs = cluster;
    config.numAttrs = cluster_log2 > 0 ? 1 : 0;
    return config;
  }

  // The number of clusters that run at once, queried once per GPU; 0 after an error.  A GPU has fewer SMs in some of its clusters'
  // places than in others, so this is less than the number of SMs divided by the size.
  static int clusters_at_once(int cluster_log2) {
    static std::atomic<int> cached[64][MAX_CLUSTER_LOG2 + 1];
    int device = 0, clusters = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return 0;
    std::atomic<int>& known = cached[device][cluster_log2];
    if ((clusters = known.load(std::memory_order_relaxed)) > 0) return clusters;
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t launch_config = config(dim3(1u << cluster_log2), cluster_log2, &cluster);
    if (cudaOccupancyMaxActiveClusters(&clusters, KERNEL, &launch_config) != cudaSuccess) return 0;
    known.store(clusters, std::memory_order_relaxed);
    return clusters;
  }

  template <typename... Args>
  static int launch(const Plan& plan, cudaStream_t stream, const Args&... args) {
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t launch_config = config(grid_of(plan), plan.cluster_log2, &cluster);
    launch_config.stream = stream;
    return static_cast<int>(cudaLaunchKernelEx(&launch_config, KERNEL, args...));
  }
};

// Chooses the number of blocks per tile with the least expected time.  All blocks must run at once, each on an SM of its own.  If
// there are more tiles than SMs, narrow blocks take one tile each: of the two on an SM, one computes while the other one starts.
// WIDE_LAUNCHER launches the wide blocks; a tile has up to `max_clusters` clusters, and an element of K or V `element_bytes`, of which
// an SM takes `sm_kb_per_us`.
template <typename WIDE_LAUNCHER>
Plan make_plan(const FaForwardArgs* args, int max_clusters, int element_bytes = 2, double sm_kb_per_us = 65) {
  Plan plan = make_tiles(args);
  plan.is_wide = plan.tiles <= sm_count();
  const int64_t steps = (args->seq_k + STEP_KEYS - 1) / STEP_KEYS;
  const double tile_kb = static_cast<double>(args->seq_k * args->head_dim * 2 * element_bytes) / 1e3;
  // Measured on an H200, as sm_kb_per_us is: what a GPC and the GPU read, and what the merges of blocks and of clusters take.
  constexpr double GPC_KB_PER_US = 690, GPU_KB_PER_US = 4500;
  constexpr double CLUSTER_US = 0.7, CLUSTERS_US = 2.5, EACH_CLUSTER_US = 0.1;
  double best_us = 0;
  for (int log2 = 0; log2 <= MAX_CLUSTER_LOG2 && plan.is_wide; ++log2) {
    const int64_t at_once = log2 == 0 ? sm_count() : WIDE_LAUNCHER::clusters_at_once(log2);
    const int64_t most = max_clusters == 1 || log2 == 0 ? 1 : std::min<int64_t>(at_once / plan.tiles, max_clusters);
    for (int64_t clusters = 1; clusters <= most && clusters * plan.tiles <= at_once; ++clusters) {
      const int64_t blocks = clusters << log2;
      if (blocks > 1 && steps < blocks * WIDE / 2) break;  // at least half of the warps have keys
      const double call_kb = tile_kb * static_cast<double>(plan.tiles);
      double us = std::max(tile_kb / static_cast<double>(blocks) / sm_kb_per_us, call_kb / GPU_KB_PER_US);
      // A cluster lies in one GPC.
      if (log2 > 0) us = std::max(us, call_kb / static_cast<double>(plan.tiles * clusters) / GPC_KB_PER_US) + CLUSTER_US;
      if (clusters > 1) us += CLUSTERS_US + EACH_CLUSTER_US * static_cast<double>(clusters);
      if (best_us > 0 && us >= best_us) continue;
      best_us = us, plan.cluster_log2 = log2, plan.clusters = static_cast<int>(clusters);
    }
  }
  const int64_t rows = std::min(args->seq_q * plan.group, plan.row_tiles * MMA_M);
  plan.vectors_per_block = rows * args->head_dim / 4 >> plan.cluster_log2;
  return plan;
}

// A plan that depends on the room for keys, but on no other sequence and on no GPU: each block has the same number of keys, which
// it writes to `steps_per_block`.  With room for few keys, four wide blocks to a cluster bring many SMs to a sequence.  Else two
// narrow ones, of which an SM has two: one computes while the other one starts.  With room for more than 16,384 keys, a block has
// twice as many for each doubling of the room.
inline Plan make_invariant_plan(const FaForwardArgs* args, uint32_t* steps_per_block) {
  constexpr int FEW_KEYS = 2048, CLUSTER_KEYS = 1024;
  Plan plan = make_tiles(args);
  plan.is_wide = args->seq_k <= FEW_KEYS;
  plan.cluster_log2 = plan.is_wide ? 2 : 1;
  int64_t cluster_keys = CLUSTER_KEYS;
  while (cluster_keys * MAX_CLUSTERS < args->seq_k) cluster_keys *= 2;
  *steps_per_block = static_cast<uint32_t>(cluster_keys >> plan.cluster_log2) / STEP_KEYS;
  plan.clusters = static_cast<int>(std::max<int64_t>(1, (args->seq_k + cluster_keys - 1) / cluster_keys));
  const int64_t rows = std::min(args->seq_q * plan.group, plan.row_tiles * MMA_M);
  plan.vectors_per_block = rows * args->head_dim / 4 >> plan.cluster_log2;
  return plan;
}

}  // namespace fa
