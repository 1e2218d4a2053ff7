// Windows and attention sinks of a decode kernel.
#pragma once

#include <algorithm>

#include "fa/decode_partial.cuh"
#include "fa_forward.h"

namespace fa {

struct Window {
  const float* sink;  // [heads], or nullptr
  int first_begin;    // query i sees no key before first_begin + i
};

constexpr int64_t NO_KEYS = INT32_MAX / 4;  // from there on, a side of a window hides no keys, or all

// The window of a call, whose end goes into `params`.  Both sides are those of a sequence with seq_k keys.
inline Window make_window(const FaForwardArgs* args, Params* params) {
  const FaForwardArgs all = fa_copy_args(args);
  const auto limited = [](int64_t keys) { return std::clamp(keys, -NO_KEYS, NO_KEYS); };
  const int64_t shift = args->seq_k - args->seq_q;  // the position of the first query
  Window window = {all.features & FA_SINK ? all.sink : nullptr, static_cast<int>(-NO_KEYS)};
  if (all.features & FA_WINDOW_LEFT) window.first_begin = static_cast<int>(limited(shift - limited(all.window_left)));
  if (all.features & FA_WINDOW_RIGHT) params->first_diagonal = static_cast<int>(limited(shift + limited(all.window_right) + 1));
  return window;
}

// A call with as many keys as the queries of its window see.  Its plan is that of the windowed call.
inline FaForwardArgs with_visible_keys(const FaForwardArgs* args) {
  FaForwardArgs all = fa_copy_args(args);
  if (all.features & FA_WINDOW_LEFT) {
    const int64_t right = all.features & FA_WINDOW_RIGHT ? std::clamp<int64_t>(all.window_right, 0, NO_KEYS) : all.seq_k;
    all.seq_k = std::min(all.seq_k, std::clamp<int64_t>(all.window_left, 0, NO_KEYS) + right + all.seq_q + STEP_KEYS - 1);
  }
  return all;
}

// The keys that this lane's rows see: a row sees those from its begin on, and below its limit.
template <int ROW_TILES>
struct WindowLimits : KeyLimits<ROW_TILES> {
  static constexpr bool HAVE_BEGIN = true;
  int last_begin;  // of all rows of the tile
  int begin_of_row[ROW_TILES][LANE_ROWS];

  __device__ __forceinline__ WindowLimits(const Params& params, const Window& window, const PackedTile& tile, const Thread& thread)
      : KeyLimits<ROW_TILES>(params, tile, thread),
        last_begin(window.first_begin + static_cast<int>(query_of(params, tile.first_row + tile.rows - 1))) {
    this->least = min(this->least, params.seq_k);  // a window may end after the last key
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int r = 0; r < LANE_ROWS; ++r) {
        begin_of_row[t][r] = window.first_begin + static_cast<int>(query_of(params, tile.first_row + t * MMA_M + r * 8 + thread.row));
      }
    }
  }

  // Whether a step begins before the window of a row.
  __device__ __forceinline__ bool hide_first_of(int last_key) const {
    return last_key - (STEP_KEYS - 1) < last_begin && !HAS_MISTAKE<WINDOW_BEGIN>;
  }

  // Hides the keys of a step that the rows of a row tile do not see.
  __device__ __forceinline__ void mask(Scores<ROW_TILES>& scores, int t, int lane_first_key) const {
    KeyLimits<ROW_TILES>::mask(scores, t, lane_first_key);
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (lane_first_key + n * MMA_N + e % 2 < begin_of_row[t][e / 2]) scores.s[t][n][e] = -CUDART_INF_F;
      }
    }
  }
};

// A partial result with the sink of its row, which is a score without a value.
__device__ __forceinline__ Partial with_sink(const Partial& partial, float sink_log2) {
  const float m = HAS_MISTAKE<SINK_MAX> ? partial.m : fmaxf(partial.m, sink_log2), m_finite = finite_or_zero(m);
  const float weight = ex2_approx_ftz(partial.m - m_finite);
  const float4 o = partial.o;
  return {make_float4(o.x * weight, o.y * weight, o.z * weight, o.w * weight), m,
          partial.l * weight + ex2_approx_ftz(sink_log2 - m_finite)};
}

}  // namespace fa
