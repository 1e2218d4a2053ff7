// Where a decode kernel finds its keys: in pages or in rows at one distance, of sequences of any lengths.
#pragma once

#include "fa/decode_rows.cuh"
#include "fa_forward.h"

namespace fa {

// Where the keys of a call are.
struct Cache {
  const int* lengths;      // [batch], or nullptr: all have seq_k keys
  const int* block_table;  // [batch, table_stride], or nullptr: a sequence is one page
  int table_stride, page_log2;
};

// The pages of one sequence.
struct Pages {
  const int* table;  // nullptr: there is only `first`
  int first, log2;

  __device__ __forceinline__ Pages(const Cache& cache, int batch)
      : table(cache.block_table == nullptr ? nullptr : cache.block_table + int64_t(batch) * cache.table_stride),
        first(table == nullptr ? batch : 0),
        log2(cache.page_log2) {}

  // The page of a key.  Entries of the table from `visible` on are not read.
  __device__ __forceinline__ int of(int key, int visible) const {
    return table != nullptr && key < visible ? __ldg(table + (key >> log2)) : first;
  }
};

// The parameters of a call, with the number of keys of the sequence of this block.
__device__ __forceinline__ Params params_of_sequence(const Params& params, const Cache& cache, int batch) {
  Params own = params;
  if (cache.lengths != nullptr) {
    own.seq_k = __ldg(cache.lengths + batch);
    if (params.first_diagonal < INT32_MAX / 2) own.first_diagonal += own.seq_k - params.seq_k;  // it ends at the last key
  }
  return own;
}

// Gives this block its part of the keys that the rows of the tile see, none of which sees a key before `begin`.
__device__ __forceinline__ void divide_keys(PackedTile& tile, const Params& params, int begin = 0) {
  const int last_query = query_of(params, tile.first_row + tile.rows - 1);
  tile.visible = max(0, min(params.seq_k, params.first_diagonal + last_query));
  const uint32_t hidden_steps = min(max(0, begin), tile.visible) / STEP_KEYS;
  const uint32_t all_steps = (tile.visible + STEP_KEYS - 1) / STEP_KEYS - hidden_steps;
  const uint32_t even_steps = all_steps / gridDim.x, remaining_steps = all_steps - even_steps * gridDim.x;
  tile.first_step = hidden_steps + blockIdx.x * even_steps + min(blockIdx.x, remaining_steps);
  tile.steps = even_steps + (blockIdx.x < remaining_steps ? 1 : 0);
}

// Gives this block the same keys for any number of other ones: its `steps` steps, as far as a row of the tile sees them.
__device__ __forceinline__ void take_fixed_keys(PackedTile& tile, const Params& params, uint32_t steps) {
  const int last_query = query_of(params, tile.first_row + tile.rows - 1);
  tile.visible = max(0, min(params.seq_k, params.first_diagonal + last_query));
  const int all_steps = (tile.visible + STEP_KEYS - 1) / STEP_KEYS;
  tile.first_step = blockIdx.x * steps;
  tile.steps = max(0, min(static_cast<int>(steps), all_steps - tile.first_step));
}

// Fills `cache` and returns FA_OK, or refuses the call.
inline int make_cache(const FaForwardArgs* args, Cache* cache) {
  const FaForwardArgs all = fa_copy_args(args);
  *cache = {all.features & FA_SEQLENS_K ? all.seqlens_k : nullptr, nullptr, 0, 31};
  if (!(all.features & FA_BLOCK_TABLE)) return FA_OK;
  if (all.page_size < STEP_KEYS || (all.page_size & (all.page_size - 1)) != 0 || all.block_table_stride > INT32_MAX) {
    return fa_refuse(args, "the page size is %lld and a row of the table has %lld entries; the page size must be a power of two from %d on",
                     static_cast<long long>(all.page_size), static_cast<long long>(all.block_table_stride), STEP_KEYS);
  }
  cache->block_table = all.block_table;
  cache->table_stride = static_cast<int>(all.block_table_stride);
  cache->page_log2 = 0;
  while (1 << cache->page_log2 < all.page_size) ++cache->page_log2;
  return FA_OK;
}

}  // namespace fa
