// The grid of kernels with one thread block per query tile, and what such kernels refuse.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "fa_forward.h"

namespace fa {

// Whether every row of a tensor can be accessed with aligned loads of `elements` 16-bit elements.
inline bool is_aligned(const void* data, const FaStrides& stride, int elements) {
  // The bitwise OR of the strides is divisible by a power of two if and only if every stride is.
  const int64_t strides_or = stride.batch | stride.head | stride.seq;
  return stride.dim == 1 && strides_or % elements == 0 && reinterpret_cast<uintptr_t>(data) % (2 * elements) == 0;
}

// Makes a grid of heads x tiles of `tile_queries` queries x batch, for a kernel that loads `vector` elements at once.  Returns
// FA_OK, or refuses the call.
inline int make_grid(const FaForwardArgs* args, int tile_queries, int vector, dim3* grid) {
  const bool aligned = is_aligned(args->q, args->q_stride, vector) && is_aligned(args->k, args->k_stride, vector) &&
                       is_aligned(args->v, args->v_stride, vector) && is_aligned(args->out, args->out_stride, vector);
  if (!aligned) return fa_refuse(args, "rows of q, k, v and out must be contiguous and start at multiples of %d bytes", 2 * vector);
  const int64_t query_tiles = (args->seq_q + tile_queries - 1) / tile_queries;
  if (args->heads > INT32_MAX || args->batch > UINT16_MAX || query_tiles > UINT16_MAX || args->seq_k > INT32_MAX / 2) {
    return fa_refuse(args, "the shape is too large: batch %lld (at most %d), heads %lld (at most %d), seq_q %lld (at most %d), "
                           "seq_k %lld (below 2^30)",
                     static_cast<long long>(args->batch), UINT16_MAX, static_cast<long long>(args->heads), INT32_MAX,
                     static_cast<long long>(args->seq_q), UINT16_MAX * tile_queries, static_cast<long long>(args->seq_k));
  }
  *grid = dim3(static_cast<unsigned>(args->heads), static_cast<unsigned>(query_tiles), static_cast<unsigned>(args->batch));
  return FA_OK;
}

}  // namespace fa
