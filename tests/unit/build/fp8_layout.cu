// Prints what kernels/fp8_wgmma does on the host and the numbers of its layout, one line of integers each, for test_fp8_layout.py.
#include <math.h>
#include <stdio.h>

#include "kernel.cu"

template <typename SHAPE>
void print_shape() {
  using Storage = Smem<fp16, SHAPE>;
  alignas(1024) static Storage smem;
  auto offset = [&](const void* part) { return static_cast<int>(static_cast<const char*>(part) - reinterpret_cast<const char*>(&smem)); };
  printf("shape %d %d %d %d\n", SHAPE::HEAD_DIM, SHAPE::GROUPS, SHAPE::BLOCK_N, static_cast<int>(sizeof(Storage)));
  printf("panel %d %d %d %d\n", SHAPE::PANEL_KEYS, SHAPE::V_ROWS, SHAPE::V_LOADED_BYTES, SHAPE::K_BYTES);
  printf("stages %d %d %d %d\n", offset(smem.k[0]), offset(smem.k[1]), offset(smem.v[0]), offset(smem.v[1]));
  printf("descriptors %llu %llu\n", static_cast<unsigned long long>(fa::k_major_descriptor_bits(SHAPE::HEAD_DIM)),
         static_cast<unsigned long long>(fa::k_major_descriptor_bits(SHAPE::PANEL_KEYS)));
  printf("qk_steps");
  for (int d = 0; d < SHAPE::HEAD_DIM; d += E4M3_MMA_K) printf(" %d", SHAPE::qk_step_bytes(d));
  printf("\npv_steps");
  for (int key = 0; key < SHAPE::BLOCK_N; key += E4M3_MMA_K) printf(" %d", SHAPE::pv_step_bytes(key));
  printf("\npanels");
  for (int key = 0; key < SHAPE::BLOCK_N; key += SHAPE::PANEL_KEYS) printf(" %d", SHAPE::pv_step_bytes(key));
  printf("\n");
}

float e4m3_value(int bits) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits), __NV_E4M3))); }

// The fragments of P in which element (row, key) of a warp's 16 x 32 tile is the e4m3 number with the bits 1 + key, negative in the
// lower eight rows.
void print_p_fragments() {
  for (int lane = 0; lane < WARP; ++lane) {
    float s[E4M3_MMA_K / MMA_N][4];
    for (int n = 0; n < E4M3_MMA_K / MMA_N; ++n) {
      for (int i = 0; i < 4; ++i) s[n][i] = e4m3_value((1 + n * MMA_N + lane % QUAD * 2 + i % 2) | (i / 2 ? 0x80 : 0));
    }
    uint32_t p[4];
    fa::make_p_fragment(p, s, 0);
    printf("p %u %u %u %u\n", p[0], p[1], p[2], p[3]);
  }
}

// The columns of a patch in which byte i of key k is 4 k + i.
template <bool IN_ORDER>
void print_patch() {
  uint32_t rows[fa::PATCH_KEYS], columns[fa::PATCH_COLUMNS][fa::PATCH_WORDS];
  for (uint32_t key = 0; key < fa::PATCH_KEYS; ++key) rows[key] = (4 * key) | (4 * key + 1) << 8 | (4 * key + 2) << 16 | (4 * key + 3) << 24;
  fa::transpose_patch<IN_ORDER>(columns, rows);
  for (auto& column : columns) {
    printf(IN_ORDER ? "in_order" : "column");
    for (uint32_t word : column) printf(" %u", word);
    printf("\n");
  }
}

int main() {
  print_shape<ShapeOf<64>>();
  print_shape<ShapeOf<128>>();
  print_p_fragments();
  print_patch<false>();
  print_patch<true>();
  printf("keys");
  for (int column = 0; column < E4M3_MMA_K; ++column) printf(" %d", fa::key_of_column(column));
  printf("\nrounded %u\n", fa::pack_e4m3(500.0f, -1e9f, 1.0f, NAN));
}
