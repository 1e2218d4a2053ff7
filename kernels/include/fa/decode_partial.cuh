// Partial results (O, m, l) of some of the keys of a row: how warps store them, how they are merged, and how the result is stored.
#pragma once

#include <math_constants.h>

#include "fa/decode_omit.cuh"
#include "fa/decode_step.cuh"

namespace fa {

// Four columns of a partial result of a row.
struct Partial {
  float4 o;    // before the division by l
  float m, l;  // m in log2
};

__device__ __forceinline__ Partial no_partial() {
  return {make_float4(0, 0, 0, 0), -CUDART_INF_F, 0.0f};
}

// Merges COUNT partial results into another one.  The loads of all of them are in flight together.
template <int COUNT>
__device__ __forceinline__ void merge(Partial& merged, const Partial (&sources)[COUNT]) {
  float m = merged.m;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) m = fmaxf(m, sources[i].m);
  const float m_finite = finite_or_zero(m), own_weight = ex2_approx_ftz(merged.m - m_finite);
  merged.m = m;
  merged.l *= own_weight;
  merged.o.x *= own_weight, merged.o.y *= own_weight, merged.o.z *= own_weight, merged.o.w *= own_weight;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float weight = ex2_approx_ftz(sources[i].m - m_finite);
    const float4 o = sources[i].o;
    merged.l += weight * sources[i].l;
    merged.o.x += weight * o.x, merged.o.y += weight * o.y, merged.o.z += weight * o.z, merged.o.w += weight * o.w;
  }
}

template <int ROW_TILES, int D_TILES>
__device__ __forceinline__ void scale_rows(float (&o)[ROW_TILES][D_TILES][4], float factor) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < D_TILES; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[t][d][i] *= factor;
    }
  }
}

// Multiplies O by a factor, and puts its columns in order, if two tiles share 16 columns: the first has the even ones, the second the
// odd ones.
template <int ROW_TILES, int D_TILES>
__device__ __forceinline__ void order_columns(float (&o)[ROW_TILES][D_TILES][4], float factor, int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int d = 0; d < D_TILES; d += 2) {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        // Lane q of a quad has columns 4 q to 4 q + 3, and needs 2 q, 2 q + 1, and the same 8 further on.
        float even[2] = {o[t][d][2 * r], o[t][d][2 * r + 1]}, odd[2] = {o[t][d + 1][2 * r], o[t][d + 1][2 * r + 1]};
        const int source = lane / QUAD * QUAD + lane % QUAD / 2;
        const bool is_second = lane % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float columns[2][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            columns[i][0] = __shfl_sync(0xffffffffu, even[i], source + half * 2);
            columns[i][1] = __shfl_sync(0xffffffffu, odd[i], source + half * 2);
          }
          o[t][d + half][2 * r] = factor * (is_second ? columns[1][0] : columns[0][0]);
          o[t][d + half][2 * r + 1] = factor * (is_second ? columns[1][1] : columns[0][1]);
        }
      }
    }
  }
}

// The partial results of the warps of a block in shared memory, each O in the ring of its warp.
template <int WARPS, int HEAD_DIM, typename RING>
struct WarpPartials {
  static constexpr int ROW_VECTORS = HEAD_DIM / 4;  // float4 per row of O
  RING (&rings)[WARPS];

  __device__ __forceinline__ float4* o(int warp) const { return reinterpret_cast<float4*>(&rings[warp]); }

  // The index of a vector of O.  The swizzle lets the lanes of an mma fragment store without conflicts.
  static __device__ __forceinline__ int index(int row, int vector_in_row) {
    return row * ROW_VECTORS + (vector_in_row ^ row % 4 * 2);
  }

  // Stores the partial result of a warp, all of whose copies have arrived.
  template <int ROW_TILES, int ROWS>
  __device__ __forceinline__ void store(float2 (&m_and_l)[WARPS][ROWS], const RowState<ROW_TILES, HEAD_DIM / MMA_N>& state, int rows,
                                        float scale_log2, const Thread& thread) const {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        const int row = t * MMA_M + r * 8 + thread.row;
        const float row_l = sum_of_quad(state.l[t][r]);
        if (row >= rows) continue;
        if (thread.lane % QUAD == 0) {
          m_and_l[thread.warp][row] = make_float2(state.m[t][r] == -CUDART_INF_F ? -CUDART_INF_F : state.m[t][r] * scale_log2, row_l);
        }
#pragma unroll
        for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
          float4* vector = &o(thread.warp)[index(row, d * 2 + thread.lane % QUAD / 2)];
          reinterpret_cast<float2*>(vector)[thread.lane % 2] = make_float2(state.o[t][d][2 * r], state.o[t][d][2 * r + 1]);
        }
      }
    }
  }

  // Merges a vector of the tile's O over the warps.
  template <int ROWS>
  __device__ __forceinline__ Partial merge_vector(const float2 (&warp_m_and_l)[WARPS][ROWS], int vector) const {
    const int row = vector / ROW_VECTORS, place = index(row, vector % ROW_VECTORS);
    Partial merged = no_partial(), sources[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float2 m_and_l = warp_m_and_l[w][row];
      sources[w].o = o(w)[place], sources[w].m = m_and_l.x, sources[w].l = m_and_l.y;
    }
    merge(merged, sources);
    return merged;
  }
};

// Stores four columns of a row of the output, and the row's log-sum-exp with the first four.  A row that sees no key is stored
// as zero and -inf.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void store_vector(const Params& params, const PackedTiles& tiles, const PackedTile& tile, int vector,
                                             const Partial& merged) {
  constexpr int ROW_VECTORS = HEAD_DIM / 4;
  const uint32_t row = tile.first_row + vector / ROW_VECTORS, query = query_of(params, row);
  const uint32_t head = tile.kv_head * tiles.group + (row - query * tiles.group);
  const float inverse_l = merged.l == 0.0f ? 0.0f : __fdividef(1.0f, merged.l);
  uint4* row_gmem = params.out + uint64_t(tile.batch) * params.out_strides.batch + uint64_t(head) * params.out_strides.head +
                    uint64_t(query) * params.out_strides.row;
  reinterpret_cast<uint2*>(row_gmem)[vector % ROW_VECTORS] = make_uint2(
      cvt_rn_x2<T>(merged.o.x * inverse_l, merged.o.y * inverse_l), cvt_rn_x2<T>(merged.o.z * inverse_l, merged.o.w * inverse_l));
  if (params.lse != nullptr && vector % ROW_VECTORS == 0) {
    params.lse[(uint64_t(tile.batch) * params.heads + head) * params.seq_q + query] =
        merged.l == 0.0f ? -CUDART_INF_F : (merged.m + log2f(merged.l)) * CUDART_LN2_F;
  }
}

}  // namespace fa
