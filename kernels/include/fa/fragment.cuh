// The sizes that the hardware gives: of warps, of fragments of mma and wgmma, and of the boxes of TMA.
#pragma once

namespace fa {

constexpr int WARP = 32;
constexpr int QUAD = 4;                           // lanes that share a row of an mma fragment
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;  // rows, columns and depth of an mma with elements of two bytes
constexpr int LANE_ROWS = 2;                      // rows of a fragment that a lane holds: r and r + 8
constexpr int GROUP_THREADS = 128;                // of a warpgroup
constexpr int GROUP_M = 64;                       // queries of a warpgroup: the rows of a wgmma
constexpr int BOX_COLUMNS = 64;                   // of two bytes, per TMA box: 128 bytes, the span of the swizzle

// O is rescaled only where P would exceed 2^8.  fp16 holds values up to 2^15 with the same relative error.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

}  // namespace fa
