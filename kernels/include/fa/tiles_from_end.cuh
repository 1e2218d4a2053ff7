// Work tiles of which the first one of a head, and not the last one, may have warpgroups without queries.
#pragma once

#include "fa/fragment.cuh"
#include "fa/schedule.cuh"
#include "fa/tile_params.cuh"

namespace fa {

struct TilesFromEnd final : TileParams {
  // Rows of the first work tile without a query: a multiple of 64, because no TMA store may begin before its tensor.
  int missing_queries;
};
template <>
inline constexpr bool HAS_ROWS_BEFORE<TilesFromEnd> = true;
__host__ __device__ __forceinline__ int rows_before(const TilesFromEnd& params) { return params.missing_queries; }
__device__ __forceinline__ bool is_query(const TilesFromEnd&, int query) { return query >= 0; }

template <typename SHAPE>
int make_tile_params(const FaForwardArgs* args, TilesFromEnd* params) {
  if (int status = make_tile_params<SHAPE>(args, static_cast<TileParams*>(params))) return status;
  params->missing_queries = (params->m_blocks * SHAPE::BLOCK_M - params->seq_q) / GROUP_M * GROUP_M;
  return FA_OK;
}

}  // namespace fa
