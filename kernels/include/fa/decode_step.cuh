// One step of a decode kernel: a warp computes S, P and P V of 16 rows or 32, and 16 keys.
#pragma once

#include <math_constants.h>

#include "fa/decode_rows.cuh"
#include "fa/ptx.cuh"
#include "fa/warp.cuh"

namespace fa {

__device__ __forceinline__ float finite_or_zero(float m) { return m == -CUDART_INF_F ? 0.0f : m; }

// What a lane holds of its rows: O, and the running softmax.
template <int ROW_TILES, int D_TILES>
struct RowState {
  float (&o)[ROW_TILES][D_TILES][4];
  float (&m)[ROW_TILES][LANE_ROWS];  // unscaled row max at the last rescale
  float (&l)[ROW_TILES][LANE_ROWS];  // this lane's part of the running row sum
};

// This lane's first 16 bytes of K of a step.  The swizzles become XORs of constants, because K and V are aligned to 256 bytes.
template <int HEAD_DIM>
__device__ __forceinline__ uint32_t k_lane_index(const Thread& thread) {
  return thread.row * (HEAD_DIM / 8) + (thread.lane % QUAD ^ thread.row % 2 * 4);
}

// S = Q K^T of one step.  With one row tile, even and odd mma have their own accumulators, which halves the chain of dependent mma.
template <int ROW_TILES>
struct Scores {
  static constexpr int CHAINS = ROW_TILES == 1 ? 2 : 1;
  float chain[CHAINS][ROW_TILES][KEY_TILES][4] = {};
  float s[ROW_TILES][KEY_TILES][4];

  template <typename T, int HEAD_DIM>
  __device__ __forceinline__ void multiply(const Queries<HEAD_DIM, ROW_TILES>& queries,
                                           const typename Queries<HEAD_DIM, ROW_TILES>::Smem& q_smem, const uint4* k_smem,
                                           uint32_t k_lane, const Thread& thread) {
    constexpr int CHUNKS = HEAD_DIM / 8;
#pragma unroll
    for (int j = 0; j < CHUNKS / QUAD; ++j) {
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        const uint4 k = k_smem[(k_lane ^ j * QUAD) + n * MMA_N * CHUNKS];
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
          uint4 q[LANE_ROWS];
#pragma unroll
          for (int r = 0; r < LANE_ROWS; ++r) q[r] = queries.chunk(q_smem, t, r, j, thread.lane);
          const uint32_t even[4] = {q[0].x, q[1].x, q[0].y, q[1].y}, odd[4] = {q[0].z, q[1].z, q[0].w, q[1].w};
          mma_m16n8k16<T>(chain[0][t][n], even, k.x, k.y);
          mma_m16n8k16<T>(chain[CHAINS - 1][t][n], odd, k.z, k.w);
        }
      }
    }
  }

  // Multiplies the chains by a factor for each of this lane's keys.
  __device__ __forceinline__ void scale(const float2 (&factors)[KEY_TILES]) {
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) {
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) chain[c][t][n][e] *= e % 2 ? factors[n].y : factors[n].x;
        }
      }
    }
  }

  // Adds the chains of a row tile.
  __device__ __forceinline__ void add_chains(int t, bool is_negated) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[t][n][e] = CHAINS == 1 ? chain[0][t][n][e] : chain[0][t][n][e] + chain[CHAINS - 1][t][n][e];
        if (is_negated) s[t][n][e] = -s[t][n][e];  // because P is computed with the absolute value of the scale
      }
    }
  }

  // Hides the keys that a row does not see.
  __device__ __forceinline__ void mask(int t, const int (&limits)[LANE_ROWS], int lane_first_key) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (lane_first_key + n * MMA_N + e % 2 >= limits[e / 2]) s[t][n][e] = -CUDART_INF_F;
      }
    }
  }

  // The maximum of this lane's keys.
  __device__ __forceinline__ float lane_max(int t, int r) const {
    return fmaxf(fmaxf(s[t][0][2 * r], s[t][0][2 * r + 1]), fmaxf(s[t][1][2 * r], s[t][1][2 * r + 1]));
  }
};

// Whether P would exceed the threshold.  If only m is -inf, the difference is inf and the comparison true.  If both are, it is NaN
// and the comparison false.
__device__ __forceinline__ bool needs_rescale(float m_new, float m, float scale_log2) {
  return (m_new - m) * scale_log2 > RESCALE_THRESHOLD_LOG2;
}

// Raises m to the maximum of the whole row, and rescales O and l.  Each row decides for itself, so that no bit of a head depends on
// the other heads of the tile.
template <int ROW_TILES, int D_TILES>
__device__ __forceinline__ void rescale(const RowState<ROW_TILES, D_TILES>& state, const float (&m_new)[ROW_TILES][LANE_ROWS],
                                        float scale_log2, bool is_first_step) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float row_max = max_of_quad(m_new[t][r]);
      if (!needs_rescale(row_max, state.m[t][r], scale_log2)) continue;
      const float rescale = ex2_approx_ftz(state.m[t][r] * scale_log2 - row_max * scale_log2);
      state.m[t][r] = row_max;
      if (is_first_step) continue;  // O is still zero
      state.l[t][r] *= rescale;
#pragma unroll
      for (int d = 0; d < D_TILES; ++d) state.o[t][d][2 * r] *= rescale, state.o[t][d][2 * r + 1] *= rescale;
    }
  }
}

// P = exp2(S - m), and its row sum.  The two accumulator fragments of S form one A fragment of P.  With HAS_FACTORS, P is multiplied
// by a factor for each of this lane's keys, and the row sum is not.
template <typename T, bool HAS_FACTORS = false, int ROW_TILES, int D_TILES>
__device__ __forceinline__ void exponentials(uint32_t (&p)[ROW_TILES][4], const RowState<ROW_TILES, D_TILES>& state,
                                             const Scores<ROW_TILES>& scores, float scale_log2, const float2* factors = nullptr) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      const float m_log2 = finite_or_zero(state.m[t][r]) * scale_log2;  // 0 for a row that has seen no key: P is exp2(-inf) = 0
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        const float low = ex2_approx_ftz(scores.s[t][n][2 * r] * scale_log2 - m_log2);
        const float high = ex2_approx_ftz(scores.s[t][n][2 * r + 1] * scale_log2 - m_log2);
        state.l[t][r] += low + high;
        if constexpr (HAS_FACTORS) {
          p[t][n * 2 + r] = cvt_rn_x2<T>(low * factors[n].x, high * factors[n].y);
        } else {
          p[t][n * 2 + r] = cvt_rn_x2<T>(low, high);
        }
      }
    }
  }
}

// Mask, row max and rescale of one step, whose last key is `last_key`.
template <int ROW_TILES, int D_TILES, typename Limits>
__device__ __forceinline__ void raise_max(const RowState<ROW_TILES, D_TILES>& state, Scores<ROW_TILES>& scores,
                                          const Limits& limits, bool needs_mask, int last_key, float scale_log2,
                                          bool is_negated, bool is_first_step, int lane) {
  bool is_above = false;
  float m_new[ROW_TILES][LANE_ROWS];
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
    scores.add_chains(t, is_negated);
    if (needs_mask) limits.mask(scores, t, last_key - (STEP_KEYS - 1) + lane % QUAD * 2);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
      m_new[t][r] = scores.lane_max(t, r);
      is_above |= needs_rescale(m_new[t][r], state.m[t][r], scale_log2);
    }
  }
  if (__any_sync(0xffffffffu, is_above)) rescale(state, m_new, scale_log2, is_first_step);
}

// From S to P of one step.
template <typename T, int ROW_TILES, int D_TILES, typename Limits>
__device__ __forceinline__ void softmax(uint32_t (&p)[ROW_TILES][4], const RowState<ROW_TILES, D_TILES>& state, Scores<ROW_TILES>& scores,
                                        const Limits& limits, bool needs_mask, int last_key, float scale_log2, bool is_negated,
                                        bool is_first_step, int lane) {
  raise_max(state, scores, limits, needs_mask, last_key, scale_log2, is_negated, is_first_step, lane);
  exponentials<T>(p, state, scores, scale_log2);
}

// This lane's row of V of a step, for ldmatrix: lane i passes the address of row i % 8 of matrix i / 8: two key tiles, then the next
// columns.
template <int HEAD_DIM>
__device__ __forceinline__ uint32_t v_lane_address(const uint4* v_smem, int lane) {
  const int key = lane % 16;
  return smem_address(&v_smem[key * (HEAD_DIM / 8)]) ^ (lane / 16 ^ key % 8) * sizeof(uint4);
}

// O += P V, for the columns from `v_address` on.  The swizzle is an XOR of constants, because V is aligned to 256 bytes.
template <typename T, int ROW_TILES, int D_TILES>
__device__ __forceinline__ void add_pv(const RowState<ROW_TILES, D_TILES>& state, const uint32_t (&p)[ROW_TILES][4], uint32_t v_address) {
#pragma unroll
  for (int d = 0; d < D_TILES; d += 2) {
    uint32_t v[4];
    ldmatrix_x4_trans(v, v_address ^ d * sizeof(uint4));
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      mma_m16n8k16<T>(state.o[t][d], p[t], v[0], v[1]);
      mma_m16n8k16<T>(state.o[t][d + 1], p[t], v[2], v[3]);
    }
  }
}

}  // namespace fa
