// The transposition of V for kernels in e4m3, through shared memory: whole rows are read, and runs of 128 bytes are written.
#pragma once

#include "fa/e4m3.cuh"
#include "fa/e4m3_tile.cuh"

namespace fa {

// The tile of V that a block transposes, [KEYS, HEAD_DIM] in shared memory, in words of four columns.
template <int HEAD_DIM>
struct VTile {
  static constexpr int KEYS = V_T_KEYS, ROW_WORDS = HEAD_DIM / 4, ROW_VECTORS = HEAD_DIM / 16;
  static constexpr int RUN = 16, RUNS = KEYS / RUN;  // keys whose bytes of one column a thread writes at once
  static constexpr int THREADS = RUNS * ROW_WORDS, VECTORS_PER_THREAD = KEYS * ROW_VECTORS / THREADS;
  // Without padding, the threads of a warp would read different keys from the same banks.
  static constexpr int PADDING_WORDS = 4, RUN_WORDS = RUN * ROW_WORDS + PADDING_WORDS, BYTES = RUNS * RUN_WORDS * 4;

  // Where four columns of a key are.
  static __host__ __device__ constexpr int word(int key, int columns) {
    return key / RUN * RUN_WORDS + key % RUN * ROW_WORDS + columns;
  }
  // Successive threads write successive vectors of a row.
  static __host__ __device__ constexpr int written_key(int thread, int i) { return (i * THREADS + thread) / ROW_VECTORS; }
  static __host__ __device__ constexpr int written_vector(int thread) { return thread % ROW_VECTORS; }
  // Successive threads read successive runs of the same four columns.
  static __host__ __device__ constexpr int read_run(int thread) { return thread % RUNS; }
  static __host__ __device__ constexpr int read_columns(int thread) { return thread / RUNS; }
};

// Returns four of the eight bytes of x (bytes 0 to 3) and y, by the four lower hexadecimal digits of `bytes`.
__host__ __device__ __forceinline__ uint32_t selected_bytes(uint32_t x, uint32_t y, uint32_t bytes) {
#ifdef __CUDA_ARCH__
  return __byte_perm(x, y, bytes);
#else
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) selected |= static_cast<uint32_t>(both >> 8 * (bytes >> 4 * i & 7) & 0xff) << 8 * i;
  return selected;
#endif
}

// Reads a thread's four columns of a run of keys.  columns[i] receives column i, with the keys in the order of P.
template <int HEAD_DIM>
__host__ __device__ __forceinline__ void transpose_run(uint32_t (&columns)[4][4], const uint32_t* tile, int thread) {
  using Tile = VTile<HEAD_DIM>;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t keys[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keys[i] = tile[Tile::word(Tile::read_run(thread) * Tile::RUN + key_of_column(word * 4 + i), Tile::read_columns(thread))];
    }
    // Columns 0 and 1, then 2 and 3, of two keys each.
    const uint32_t low_01 = selected_bytes(keys[0], keys[1], 0x5140), low_23 = selected_bytes(keys[2], keys[3], 0x5140);
    const uint32_t high_01 = selected_bytes(keys[0], keys[1], 0x7362), high_23 = selected_bytes(keys[2], keys[3], 0x7362);
    columns[0][word] = selected_bytes(low_01, low_23, 0x5410);
    columns[1][word] = selected_bytes(low_01, low_23, 0x7632);
    columns[2][word] = selected_bytes(high_01, high_23, 0x5410);
    columns[3][word] = selected_bytes(high_01, high_23, 0x7632);
  }
}

// Writes V^T, as transpose_v does.  A block transposes 128 keys of all columns.
template <int HEAD_DIM>
__global__ void __launch_bounds__(VTile<HEAD_DIM>::THREADS)
transpose_v_tile(const uint8_t* v, uint8_t* v_t, FaStrides stride, int seq_k, int keys) {
  using Tile = VTile<HEAD_DIM>;
  extern __shared__ __align__(16) unsigned char v_tile_bytes[];
  uint32_t* const tile_smem = reinterpret_cast<uint32_t*>(v_tile_bytes);
  const int thread = threadIdx.x, first_key = blockIdx.x * Tile::KEYS;
  const uint8_t* v_gmem = v + blockIdx.z * stride.batch + blockIdx.y * stride.head + first_key * stride.seq;
  uint4 vectors[Tile::VECTORS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < Tile::VECTORS_PER_THREAD; ++i) {
    const int key = Tile::written_key(thread, i);
    const uint8_t* vector_gmem = v_gmem + key * stride.seq + Tile::written_vector(thread) * 16;
    vectors[i] = first_key + key < seq_k ? *reinterpret_cast<const uint4*>(vector_gmem) : make_uint4(0, 0, 0, 0);
  }
  if (thread >= WARP) delay_if_omitted<V_WRITTEN>();
#pragma unroll
  for (int i = 0; i < Tile::VECTORS_PER_THREAD; ++i) {
    const int word = Tile::word(Tile::written_key(thread, i), Tile::written_vector(thread) * 4);
    *reinterpret_cast<uint4*>(tile_smem + word) = vectors[i];
  }
  sync_block<V_WRITTEN>();
  uint32_t columns[4][4];
  transpose_run<HEAD_DIM>(columns, tile_smem, thread);
  const uint64_t first_column = (uint64_t(blockIdx.z) * gridDim.y + blockIdx.y) * HEAD_DIM + Tile::read_columns(thread) * 4;
  uint8_t* const v_t_gmem = v_t + first_column * keys + first_key + Tile::read_run(thread) * Tile::RUN;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(v_t_gmem + uint64_t(i) * keys) = make_uint4(columns[i][0], columns[i][1], columns[i][2], columns[i][3]);
  }
}

// Launches transpose_v_tile, which writes the workspace.  Returns FA_OK, or refuses the call.
template <int HEAD_DIM>
int launch_transpose_v_tile(const FaForwardArgs* args, cudaStream_t stream) {
  if (int refusal = check_workspace(args, v_t_bytes(args))) return refusal;
  const int keys = static_cast<int>(v_t_keys(args));
  const dim3 grid(static_cast<unsigned>(keys / V_T_KEYS), static_cast<unsigned>(args->kv_heads), static_cast<unsigned>(args->batch));
  transpose_v_tile<HEAD_DIM><<<grid, VTile<HEAD_DIM>::THREADS, VTile<HEAD_DIM>::BYTES, stream>>>(
      static_cast<const uint8_t*>(args->v), static_cast<uint8_t*>(args->workspace), args->v_stride, static_cast<int>(args->seq_k), keys);
  return static_cast<int>(cudaPeekAtLastError());
}

}  // namespace fa
