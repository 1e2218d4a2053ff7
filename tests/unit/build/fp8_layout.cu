// Prints what a kernel in e4m3 does on the host and the numbers of its layout, one line of integers each, for test_fp8_layout.py.
#include <math.h>
#include <stdio.h>

#include <vector>

#include "kernel.cu"

#include "fa/e4m3_transpose.cuh"

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

// The tile that transpose_v_tile transposes: the words that successive threads write and read, and V^T, if byte c of key k is
// 7 k + c.
template <int HEAD_DIM>
void print_tile() {
  using Tile = fa::VTile<HEAD_DIM>;
  std::vector<uint32_t> tile(Tile::BYTES / 4, 0xffffffffu);
  printf("tile %d %d %d %d", HEAD_DIM, Tile::THREADS, Tile::VECTORS_PER_THREAD, Tile::BYTES);
  printf("\nwritten");
  for (int i = 0; i < Tile::VECTORS_PER_THREAD; ++i) {
    for (int thread = 0; thread < Tile::THREADS; ++thread) {
      const int key = Tile::written_key(thread, i), word = Tile::word(key, Tile::written_vector(thread) * 4);
      printf(" %d", word);
      for (int byte = 0; byte < 16; ++byte) {
        reinterpret_cast<uint8_t*>(&tile[word])[byte] = static_cast<uint8_t>(7 * key + Tile::written_vector(thread) * 16 + byte);
      }
    }
  }
  printf("\nread");
  for (int key = 0; key < Tile::RUN; ++key) {
    for (int thread = 0; thread < Tile::THREADS; ++thread) {
      printf(" %d", Tile::word(Tile::read_run(thread) * Tile::RUN + key, Tile::read_columns(thread)));
    }
  }
  std::vector<uint32_t> v_t(HEAD_DIM * Tile::KEYS / 4);
  for (int thread = 0; thread < Tile::THREADS; ++thread) {
    uint32_t columns[4][4];
    fa::transpose_run<HEAD_DIM>(columns, tile.data(), thread);
    for (int i = 0; i < 4; ++i) {
      for (int word = 0; word < 4; ++word) {
        v_t[(Tile::read_columns(thread) * 4 + i) * Tile::KEYS / 4 + Tile::read_run(thread) * 4 + word] = columns[i][word];
      }
    }
  }
  printf("\nv_t");
  for (uint32_t word : v_t) printf(" %u", word);
  printf("\n");
}

int main() {
  print_shape<ShapeOf<64>>();
  print_shape<ShapeOf<128>>();
  print_p_fragments();
  print_patch<false>();
  print_patch<true>();
  print_tile<64>();
  print_tile<128>();
  printf("keys");
  for (int column = 0; column < E4M3_MMA_K; ++column) printf(" %d", fa::key_of_column(column));
  printf("\nrounded %u\n", fa::pack_e4m3(500.0f, -1e9f, 1.0f, NAN));
}
