// What the shapes of work tiles of the persistent e4m3 kernels cost.
#pragma once

namespace fa {

// The times of a shape on an H200 while all SMs work, in microseconds.  They are used to compare shapes.
template <typename SHAPE>
struct E4m3Costs {
  // The TFLOP/s of the key tiles.  At D = 64, those of two and three warpgroups follow from the times of fp8_sum and fp8_max at
  // b2h16s4096d64, and those of four from a trial at b1h32s4096d64; at D = 128, those of two from fp8_transpose at b2h16s4096 and
  // b1h16s8192.  One warpgroup is assumed to lose as much as in fp16, at D = 128 from the rate of fp8_keys.
  static constexpr double STEADY_TFLOPS =
      SHAPE::HEAD_DIM == 64 ? (SHAPE::GROUPS == 1 ? 490 : SHAPE::GROUPS == 2 ? 555 : SHAPE::GROUPS == 3 ? 681 : 677)
                            : (SHAPE::GROUPS == 1 ? 775 : 1070);
  static constexpr int H200_SMS = 132;
  static constexpr double KEY_TILE_US = 4.0 * SHAPE::BLOCK_M * SHAPE::BLOCK_N * SHAPE::HEAD_DIM * H200_SMS / STEADY_TFLOPS * 1e-6;
  static constexpr double WORK_TILE_US = 1.5;  // to start and to finish a work tile
};

}  // namespace fa
