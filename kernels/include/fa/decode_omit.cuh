// What deliberately wrong decode kernels omit, see omit.cuh.
#pragma once

#include "fa/omit.cuh"

#ifndef MISTAKE
#define MISTAKE NO_MISTAKE
#endif

namespace fa {

// The barriers of the decode kernels and what each guarantees.
enum DecodeBarrier {
  NONE,
  K_COPIED,             // the copies of this warp's K have arrived
  V_COPIED,             // the copies of this warp's V have arrived
  WARP_PARTIAL_STORED,  // all warps have stored their partial results
  INCOMING_FULL,        // the partial results of the other blocks of the cluster have arrived
  TILE_COPIED,          // decode_tile: the copies of all threads for a tile of K and V have arrived
};

// What else can be missing.
enum DecodeMistake {
  NO_MISTAKE,
  EMPTY_SPLIT,  // the partial result of a warp without keys
  LAST_TAG,     // the tag of the last cluster, so that no cluster sees all tags
  OWN_COUNT,    // the number of clusters of this call: that of the call before is used
  NEXT_PAGE,    // decode_paged: the lookup of the next page, so that the page of the first step is used for all
  TAIL_ZEROS,   // decode_paged: the zeros in place of slots behind the last key
  V_SCALES,     // decode_e4m3: the scales of V
  WINDOW_BEGIN,  // decode_window: the mask before the window of a row, in the step in which it begins
  SINK_MAX,      // decode_window: the sink in the maximum
};

template <DecodeMistake KIND>
inline constexpr bool HAS_MISTAKE = KIND == DecodeMistake::MISTAKE;

template <DecodeBarrier BARRIER, int PENDING>
__device__ __forceinline__ void wait_copies() {
  if constexpr (!IS_OMITTED_BARRIER<BARRIER>) cp_async_wait_group<PENDING>();
}

}  // namespace fa
