// Sequences of any lengths, which only the device knows, in kernels whose work tiles are numbered: padded to the longest one,
// behind one another, or with keys in pages.
#pragma once

#include <type_traits>

#include "fa/output_rows.cuh"
#include "fa/ring.cuh"
#include "fa/schedule.cuh"
#include "fa/tile_params.cuh"
#include "fa/tile_store.cuh"
#include "fa_forward.h"

namespace fa {

// The rows of a sequence in a tensor, and the batch there.
struct Rows {
  int first, batch, count;
};

// Where the sequences of a call have their queries or their keys.
struct Sequences {
  const int* numbers;  // [batch] lengths, or [batch + 1] starts; nullptr: all have the longest length
  int are_starts;

  __device__ __forceinline__ Rows rows_of(int sequence, int longest) const {
    if (numbers == nullptr) return {0, sequence, longest};
    const int number = __ldg(numbers + sequence);
    if (are_starts) return {number, 0, __ldg(numbers + sequence + 1) - number};
    return {0, sequence, number};
  }
};

// What the parameters of a kernel have besides those of its work tiles.  seq_q and seq_k are the longest lengths.
struct RaggedParams {
  Sequences queries, keys;
  OutputRows out;
  int64_t lse_rows;    // of a head
  int moves_diagonal;  // the mask ends at the last key of each sequence
  const int* block_table;  // [batch, table_stride], or nullptr: keys are rows
  int table_stride, page_log2;
};
struct NotRagged {};

// A work tile, and its sequence.
struct RaggedTile : WorkTile {
  Rows queries, keys;
};

// The parameters of a call with the lengths of the sequence of a work tile.  By value, so that the machine code of kernels without
// lengths stays as it was measured.
template <typename PARAMS>
__device__ __forceinline__ const PARAMS& own_params(const PARAMS& params, WorkTile) {
  return params;
}
template <typename PARAMS>
__device__ __forceinline__ PARAMS own_params(const PARAMS& params, RaggedTile work) {
  PARAMS own = params;
  own.seq_q = work.queries.count, own.seq_k = work.keys.count;
  const int shift = own.seq_k - own.seq_q - (params.seq_k - params.seq_q);
  own.first_begin += shift;
  own.first_diagonal += params.moves_diagonal ? shift : 0;
  return own;
}

// Returns a work tile by its number.  Ragged batches have the numbers of a batch whose sequences all are as long as the longest one:
// each work tile behind the end of its sequence costs its block two loads and an unused O, and the blocks get different amounts of
// work.
template <typename SHAPE, typename PARAMS>
__device__ __forceinline__ auto find_work_tile(const PARAMS& params, int number) {
  const WorkTile longest = make_work_tile<SHAPE>(params, number);
  if constexpr (std::is_base_of_v<RaggedParams, PARAMS>) {
    const int sequence = longest.batch_head / params.heads;
    RaggedTile work = {longest, params.queries.rows_of(sequence, params.seq_q), params.keys.rows_of(sequence, params.seq_k)};
    const int end_query = min(work.queries.count, work.first_query + SHAPE::BLOCK_M);
    work.key_tiles = work.first_query < end_query ? visible_key_tiles<SHAPE>(own_params(params, work), end_query) : 0;
    return work;
  } else {
    return longest;
  }
}

// The same after the keys of the tile, where its sequence is read once more: between, registers have other uses.
template <typename SHAPE, typename PARAMS>
__device__ __forceinline__ RaggedTile find_work_tile_again(const PARAMS& params, int number) {
  asm volatile("" : "+r"(number));  // another number, as far as the compiler knows
  return find_work_tile<SHAPE>(params, number);
}

// Where TMA finds the first row of a work tile's sequence.
struct Origin {
  int row, batch;
};
__device__ __forceinline__ Origin origin_of_queries(const WorkTile&, const Head& head) { return {0, head.batch}; }
__device__ __forceinline__ Origin origin_of_queries(const RaggedTile& work, const Head&) {
  return {work.queries.first, work.queries.batch};
}

// Loads tile j of K or V, of COLUMNS columns, of a key/value head.  Called by one thread.
template <typename SHAPE, int COLUMNS, typename T, typename PARAMS>
__device__ __forceinline__ void load_keys(T* to_smem, const CUtensorMap& map, const PARAMS&, const WorkTile&, int j, const Head& head,
                                          uint64_t* full_smem) {
  mbarrier_arrive_expect_tx(full_smem, SHAPE::BLOCK_N * BOXED<COLUMNS> * sizeof(T));
  load_rows<COLUMNS, SHAPE::BLOCK_N>(to_smem, map, j * SHAPE::BLOCK_N, head.kv_head, head.batch, full_smem);
}

// With pages, in boxes of PAGE_ROWS rows, without those behind the last key: their entries of the table may be any number.
template <typename SHAPE, int COLUMNS, typename T, typename PARAMS>
__device__ __forceinline__ void load_keys(T* to_smem, const CUtensorMap& map, const PARAMS& params, const RaggedTile& work, int j,
                                          const Head& head, uint64_t* full_smem) {
  constexpr int BLOCK_N = SHAPE::BLOCK_N, ROW_BYTES = BOXED<COLUMNS> * sizeof(T);
  if (params.block_table == nullptr) {
    mbarrier_arrive_expect_tx(full_smem, BLOCK_N * ROW_BYTES);
    load_rows<COLUMNS, BLOCK_N>(to_smem, map, work.keys.first + j * BLOCK_N, head.kv_head, work.keys.batch, full_smem);
    return;
  }
  const int boxes = (min(BLOCK_N, work.keys.count - j * BLOCK_N) + PAGE_ROWS - 1) / PAGE_ROWS;
  const int* table = params.block_table + int64_t(work.keys.batch) * params.table_stride;
  mbarrier_arrive_expect_tx(full_smem, boxes * PAGE_ROWS * ROW_BYTES);
#pragma unroll 1
  for (int box = 0; box < boxes; ++box) {
    const int key = j * BLOCK_N + box * PAGE_ROWS, page = __ldg(table + (key >> params.page_log2));
    const int row = key & ((1 << params.page_log2) - 1);
#pragma unroll
    for (int d = 0; d < COLUMNS; d += BOX_COLUMNS) {
      T* box_smem = to_smem + d * BLOCK_N + box * PAGE_ROWS * BOX_COLUMNS;
      cp_async_bulk_tensor_4d(box_smem, map, d, row, head.kv_head, page, full_smem);
    }
  }
}

// Clears the rows of a tile of V from `rows` on, for all threads of a warpgroup.  They belong to another sequence, or to none, and
// may hold NaN, and 0 * NaN is NaN.  Several warpgroups may write these zeros.
template <typename SHAPE, typename T>
__device__ __forceinline__ void clear_tail(T* v_smem, int rows, int named_barrier, int thread_in_group) {
  constexpr int ROW_VECTORS = BOX_COLUMNS * sizeof(T) / sizeof(uint4);
#pragma unroll 1
  for (int i = rows * ROW_VECTORS + thread_in_group; i < SHAPE::BLOCK_N * ROW_VECTORS; i += GROUP_THREADS) {
#pragma unroll
    for (int d = 0; d < SHAPE::BOXED_DIM_V; d += BOX_COLUMNS) {
      reinterpret_cast<uint4*>(v_smem + d * SHAPE::BLOCK_N)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  fence_proxy_async();
  barrier_sync<GROUP_THREADS>(named_barrier);
}

// Normalises and stores a warpgroup's rows of O, and their log-sum-exps.  TMA would also write rows of the next sequence, so it
// stores 64 rows or none.
template <auto O_WRITTEN, bool STORES_WHOLE, int O_TILES, typename T, typename SOFTMAX, typename PARAMS>
__device__ __forceinline__ void store_ragged(T* o_smem, float (&o)[O_TILES][4], const SOFTMAX& softmax, const CUtensorMap& o_map,
                                             const PARAMS& params, const RaggedTile& work, const Head& head, int group,
                                             int lane_row, int named_barrier, int thread_in_group, int lane) {
  const int query = work.first_query + group * GROUP_M + lane_row;
  struct {
    float* lse;  // of the sequence and the head
    int heads, seq_q;
  } own = {params.lse, 0, work.queries.count};
  const Head at = {head.query_head, head.kv_head, work.queries.batch};
  if (own.lse != nullptr) own.lse += (int64_t(at.batch) * params.heads + at.query_head) * params.lse_rows + work.queries.first;
  normalise(o, softmax, own, Head{}, query, lane);
  const int first_query = work.queries.first + work.first_query, end_query = work.queries.first + work.queries.count;
  const bool is_whole = STORES_WHOLE || first_query + (group + 1) * GROUP_M <= end_query;
  // Every warpgroup calls this, also one that stores nothing with it.  With the barriers of store_o under a condition, ptxas 13.0
  // keeps the stage and the addresses of the loop over key tiles in a register per lane, and a step has a sixth more instructions.
  own.seq_q = is_whole ? end_query : 0;
  store_o<O_WRITTEN, O_TILES>(o_smem, o, o_map, own, at, first_query, group, named_barrier, thread_in_group, lane);
  if (!is_whole) store_rows<T>(o, params.out, at, work.queries.first + query, end_query, lane);
}

// Fills the parameters of a call that the other parameters have accepted and returns FA_OK, or refuses it.
template <typename PARAMS>
int make_ragged_params(const FaForwardArgs* args, PARAMS* params) {
  const FaForwardArgs all = fa_copy_args(args);
  const bool has_starts = all.features & FA_CU_SEQLENS_Q, has_key_starts = all.features & FA_CU_SEQLENS_K;
  const bool has_pages = all.features & FA_BLOCK_TABLE;
  if (has_starts != has_key_starts && !has_pages) {
    return fa_refuse(args, "the call has one of cu_seqlens_q and cu_seqlens_k, and no pages; this kernel takes both or none");
  }
  if (has_pages && (all.page_size < PAGE_ROWS || (all.page_size & (all.page_size - 1)) != 0 || all.block_table_stride > INT32_MAX)) {
    return fa_refuse(args, "the page size is %lld and a row of the table has %lld entries; the page size must be a power of two from %d on",
                     static_cast<long long>(all.page_size), static_cast<long long>(all.block_table_stride), PAGE_ROWS);
  }
  params->queries = {has_starts ? all.cu_seqlens_q : all.features & FA_SEQLENS_Q ? all.seqlens_q : nullptr, has_starts};
  params->keys = {has_key_starts ? all.cu_seqlens_k : all.features & FA_SEQLENS_K ? all.seqlens_k : nullptr, has_key_starts};
  params->out = output_rows_of(args);
  params->lse_rows = has_starts ? all.rows_q : all.seq_q;
  params->moves_diagonal = all.causal == FA_CAUSAL_BOTTOM_RIGHT || all.features & FA_WINDOW_RIGHT;
  params->block_table = has_pages ? all.block_table : nullptr;
  params->table_stride = static_cast<int>(all.block_table_stride);
  params->page_log2 = 0;
  while (1 << params->page_log2 < all.page_size) ++params->page_log2;
  return FA_OK;
}

// The tensors of a call: one batch of all rows if its sequences lie behind one another.
inline FaForwardArgs tensors_of(const FaForwardArgs* args) {
  FaForwardArgs all = fa_copy_args(args);
  if (!(all.features & FA_CU_SEQLENS_Q)) return all;
  all.batch = 1, all.seq_q = all.rows_q;
  for (FaStrides* stride : {&all.q_stride, &all.out_stride}) stride->batch = stride->seq;
  if (!(all.features & FA_CU_SEQLENS_K)) return all;
  all.seq_k = all.rows_k;
  for (FaStrides* stride : {&all.k_stride, &all.v_stride}) stride->batch = stride->seq;
  return all;
}

}  // namespace fa
