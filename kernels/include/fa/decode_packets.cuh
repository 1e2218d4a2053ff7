// How several clusters that share the keys of a tile merge their partial results: through the workspace, in the same kernel.
#pragma once

#include "fa/decode_exchange.cuh"

namespace fa {

// Marks a packet in the workspace as stored.  The workspace may contain anything before a call.  Any other value, such as NaN or
// the data of another call, means 'not stored'.
constexpr uint64_t STORED = 0x9e6c63d0876a9a47ull;

// 8 bytes of a partial result and their tag, which one instruction stores and loads.
struct alignas(16) Packet {
  uint64_t payload, tag;
};
constexpr int PACKETS = 3;  // per vector of a partial O: columns 0 and 1, columns 2 and 3, and m (in log2) and l of the row

__device__ __forceinline__ Packet load_packet(const Packet* packet_gmem) {
  const ulonglong2 bits = ld_relaxed_gpu(reinterpret_cast<const ulonglong2*>(packet_gmem));
  return {bits.x, bits.y};
}

__device__ __forceinline__ void store_packet(Packet* packet_gmem, Packet packet) {
  st_relaxed_gpu(reinterpret_cast<ulonglong2*>(packet_gmem), make_ulonglong2(packet.payload, packet.tag));
}

__device__ __forceinline__ uint64_t pack(float low, float high) {
  return uint64_t(__float_as_uint(high)) << 32 | __float_as_uint(low);
}
__device__ __forceinline__ float low_of(uint64_t payload) { return __uint_as_float(static_cast<uint32_t>(payload)); }
__device__ __forceinline__ float high_of(uint64_t payload) { return __uint_as_float(static_cast<uint32_t>(payload >> 32)); }

// Merges the clusters, for one vector of O per lane with `is_valid`, of which the lane passes the partial result of this cluster.
// Every cluster first stores its packets and then loads those of all clusters.  The fence orders the two, so at least the last
// cluster finds all tags.  Every cluster that does stores the output.  If several do, they store the same bits.  They also clear
// the tags, so that the next call, which may be a replay with the same workspace, finds none.  Two calls at the same time need two
// workspaces.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void merge_clusters(const Params& params, const Split& split, const PackedTile& tile, const Partial& own,
                                               int cluster, Packet* slot_gmem, uint64_t cluster_stride, int vector, bool is_valid,
                                               int lane) {
  if (is_valid && !(HAS_MISTAKE<LAST_TAG> && cluster == split.clusters - 1)) {
    Packet* own_gmem = slot_gmem + cluster * cluster_stride;
    store_packet(own_gmem, {pack(own.o.x, own.o.y), STORED});
    store_packet(own_gmem + 1, {pack(own.o.z, own.o.w), STORED});
    store_packet(own_gmem + 2, {pack(own.m, own.l), STORED});
  }
  __syncwarp();
  if (lane == 0) __threadfence();  // one fence per warp: all fences have one order, and the warp with the last one finds all tags
  __syncwarp();
  if (!is_valid) return;
  Partial merged = no_partial();
  bool all_are_stored = true;
  for (int first = 0; first < split.clusters_to_merge; first += MERGED_AT_ONCE) {
    Packet packets[MERGED_AT_ONCE][PACKETS];
#pragma unroll
    for (int i = 0; i < MERGED_AT_ONCE; ++i) {
#pragma unroll
      for (int p = 0; p < PACKETS; ++p) {
        packets[i][p] = load_packet(slot_gmem + min(first + i, split.clusters_to_merge - 1) * cluster_stride + p);
      }
    }
    Partial sources[MERGED_AT_ONCE];
#pragma unroll
    for (int i = 0; i < MERGED_AT_ONCE; ++i) {
      const Packet(&source)[PACKETS] = packets[i];
      all_are_stored &= source[0].tag == STORED && source[1].tag == STORED && source[2].tag == STORED;
      sources[i] = no_partial();
      if (first + i >= split.clusters_to_merge) continue;
      sources[i].o = make_float4(low_of(source[0].payload), high_of(source[0].payload), low_of(source[1].payload), high_of(source[1].payload));
      sources[i].m = low_of(source[2].payload), sources[i].l = high_of(source[2].payload);
    }
    merge(merged, sources);
  }
  if (!all_are_stored) return;
  store_vector<T, HEAD_DIM>(params, split.tiles, tile, vector, merged);
  for (int i = 0; i < split.clusters * PACKETS; ++i) store_packet(slot_gmem + i / PACKETS * cluster_stride + i % PACKETS, {0, 0});
}

}  // namespace fa
