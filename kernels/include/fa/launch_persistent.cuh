// The launch of a persistent kernel with the tensor maps of Q, K, V and O.
#pragma once

#include "fa/tile_params.cuh"

namespace fa {

// Launches KERNEL with a block for each work tile, or as many as the GPU runs at the same time.
template <auto KERNEL, typename SHAPE, int SMEM_BYTES, typename PARAMS>
int launch_persistent(const FaForwardArgs* args, const PARAMS& params, cudaStream_t stream) {
  TensorMaps maps;
  if (int status = make_tensor_maps<SHAPE>(args, &maps)) return status;
  static OncePerDevice prepare;
  const auto prepare_once = [&] { return prepare_kernel<SHAPE, SMEM_BYTES>(args, reinterpret_cast<const void*>(KERNEL)); };
  if (int status = prepare(prepare_once)) return status;
  const int blocks = std::min(params.work_tiles, max_blocks<SHAPE>());
  KERNEL<<<blocks, SHAPE::THREADS, SMEM_BYTES, stream>>>(params, maps.q, maps.k, maps.v, maps.o);
  return static_cast<int>(cudaPeekAtLastError());
}

// The same for a kernel that needs no parameters but those of its work tiles.
template <auto KERNEL, typename SHAPE, int SMEM_BYTES>
int launch_persistent(const FaForwardArgs* args, cudaStream_t stream) {
  TileParams params;
  if (int status = make_tile_params<SHAPE>(args, &params)) return status;
  return launch_persistent<KERNEL, SHAPE, SMEM_BYTES>(args, params, stream);
}

}  // namespace fa
