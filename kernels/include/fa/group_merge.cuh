// The merge of groups of warps that have the same queries and different keys.  Each group merges some columns of O, and hands its
// other columns to the other groups through shared memory.
//
// The shared memory of a kernel has `group[g].partial_o`, a PartialO, and `m[g][row]` and `l[g][row]`, for each group g.
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include "fa/ptx.cuh"
#include "fa/softmax.cuh"
#include "fa/tile.cuh"
#include "fa/warp.cuh"

namespace fa {

// The partial O of one group, indexed by the group that merges these columns; one float4 per fragment and lane.
template <int GROUPS, int D_TILES, int GROUP_THREADS>
using PartialO = float4[GROUPS][D_TILES / GROUPS][GROUP_THREADS];

// What a lane has merged: the pairs of adjacent elements of O of its two rows, m in log2, and l.
template <int ROW_PAIRS>
struct Merged {
  float2 o[2 * ROW_PAIRS];
  float m_log2[2], l[2];
};

// Stores m and l, which becomes the sum over the quad, and the columns of O that other groups merge.  `own_o` are the others.
template <typename SMEM, int ROW_PAIRS, int D_TILES>
__device__ __forceinline__ void store_partial(SMEM& smem, float4 (&own_o)[ROW_PAIRS], const float (&o)[D_TILES][4],
                                              const float (&m)[2], float (&l)[2], int group, int thread_in_group, int lane_row) {
#pragma unroll
  for (int d = 0; d < D_TILES; ++d) {
    const float4 partial = make_float4(o[d][0], o[d][1], o[d][2], o[d][3]);
    if (d / ROW_PAIRS == group) {
      own_o[d % ROW_PAIRS] = partial;
    } else {
      smem.group[group].partial_o[d / ROW_PAIRS][d % ROW_PAIRS][thread_in_group] = partial;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l[r] = sum_of_quad(l[r]);
    if (thread_in_group % QUAD != 0) continue;
    smem.m[group][lane_row + r * 8] = m[r];
    smem.l[group][lane_row + r * 8] = l[r];
  }
}

// Merges the columns of this group.
template <int GROUPS, typename SMEM, int ROW_PAIRS>
__device__ __forceinline__ Merged<ROW_PAIRS> merge_groups(const SMEM& smem, const float4 (&own_o)[ROW_PAIRS], int group,
                                                          int thread_in_group, int lane_row, float scale_log2) {
  Merged<ROW_PAIRS> merged;
  float weight[GROUPS][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m_all = -CUDART_INF_F;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) m_all = fmaxf(m_all, smem.m[g][lane_row + r * 8]);
    merged.m_log2[r] = finite_log2(m_all, scale_log2);
    merged.l[r] = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      weight[g][r] = ex2_approx_ftz(smem.m[g][lane_row + r * 8] * scale_log2 - merged.m_log2[r]);
      merged.l[r] += smem.l[g][lane_row + r * 8] * weight[g][r];
    }
  }
#pragma unroll
  for (int d = 0; d < ROW_PAIRS; ++d) {
    float2 rows[2] = {};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const float4 partial = g == group ? own_o[d] : smem.group[g].partial_o[group][d][thread_in_group];
      rows[0].x += partial.x * weight[g][0];
      rows[0].y += partial.y * weight[g][0];
      rows[1].x += partial.z * weight[g][1];
      rows[1].y += partial.w * weight[g][1];
    }
    merged.o[d] = rows[0];
    merged.o[ROW_PAIRS + d] = rows[1];
  }
  return merged;
}

}  // namespace fa
