// How the blocks of a cluster exchange their partial results.  Each block finishes an equal, contiguous part of the vectors of O,
// and receives that part from all other blocks in its shared memory.
#pragma once

#include "fa/decode_partial.cuh"

namespace fa {

constexpr int MERGED_AT_ONCE = 4;  // partial results whose loads are in flight together

struct Packet;

// How the host has divided the work.
struct Split {
  Packet* packets;  // of several clusters per tile, see decode_packets.cuh
  PackedTiles tiles;
  int cluster_log2, clusters;  // blocks per cluster, and clusters per tile
  int clusters_to_merge;
};

// Prepares the mbarrier of INCOMING_FULL, which counts the bytes that will arrive.  Another block may send when it has waited at the
// cluster barrier.
__device__ __forceinline__ void expect_incoming(uint64_t* full, int vectors, int cluster_log2, int cluster_size) {
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    const int incoming_vectors = (vectors >> cluster_log2) * (cluster_size - 1);
    mbarrier_arrive_expect_tx(full, incoming_vectors * (sizeof(float4) + sizeof(float2)));
  }
  __syncwarp();
  barrier_cluster_arrive_relaxed();
}

// SMEM is the shared memory of a block: `incoming_o` and `incoming_m_and_l` are [source block, vectors that this block finishes],
// without those of this block.
template <typename SMEM>
struct Exchange {
  SMEM& smem;
  int cluster_size, rank;
  int own_vectors, sent_vectors;  // vectors that this block finishes, and sends

  __device__ __forceinline__ Exchange(SMEM& smem, int vectors, int cluster_log2, int rank)
      : smem(smem),
        cluster_size(1 << cluster_log2),
        rank(rank),
        own_vectors(vectors >> cluster_log2),
        sent_vectors(vectors - own_vectors) {}

  // Sends a vector to the block that finishes it.
  __device__ __forceinline__ void send(int vector, const Partial& merged) const {
    int owner = 0, slot = vector;
    for (int half = cluster_size / 2; half > 0; half /= 2) {  // owner = vector / own_vectors, and slot is the remainder
      if (slot >= half * own_vectors) owner += half, slot -= half * own_vectors;
    }
    slot += own_vectors * (rank - (rank > owner ? 1 : 0));  // a block has no slots for itself
    const uint32_t barrier_address = mapa(smem_address(&smem.incoming_full), owner);
    st_async(mapa(smem_address(&smem.incoming_o[slot]), owner), merged.o, barrier_address);
    st_async(mapa(smem_address(&smem.incoming_m_and_l[slot]), owner), make_float2(merged.m, merged.l), barrier_address);
  }

  // Merges what the other blocks have sent for a vector of this block.  No block exits before it has received everything, so none
  // sends to one that has exited.  The wait acquires at the scope of the block, which is the default.  PTX would ask for that of the
  // cluster, which also invalidates L1; but L1 caches no shared memory, so that nothing stale can be read.
  __device__ __forceinline__ Partial merge_incoming(int slot, bool is_valid, Partial merged) const {
    wait<INCOMING_FULL>(&smem.incoming_full, 0);
    for (int first_source = 0; first_source < cluster_size - 1 && is_valid; first_source += MERGED_AT_ONCE) {
      Partial sources[MERGED_AT_ONCE];
#pragma unroll
      for (int i = 0; i < MERGED_AT_ONCE; ++i) {
        const int index = min(first_source + i, cluster_size - 2) * own_vectors + slot;
        const float4 o = smem.incoming_o[index];
        const float2 m_and_l = smem.incoming_m_and_l[index];
        sources[i] = {o, m_and_l.x, m_and_l.y};
        if (first_source + i >= cluster_size - 1) sources[i].m = -CUDART_INF_F;  // the last one, in place of one that does not exist
      }
      merge(merged, sources);
    }
    return merged;
  }
};

}  // namespace fa
