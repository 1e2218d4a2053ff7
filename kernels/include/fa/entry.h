// The end of every kernel file: fa_forward, which launches the instantiation for the dtype and head_dim of a call.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fa_forward.h"
#include "fa_instantiations.h"  // FA_FOR_EACH_INSTANTIATION: the manifest's dtypes and head_dims

using fp16 = __half;
using bf16 = __nv_bfloat16;
using e4m3 = uint8_t;  // one byte

namespace fa {

// Calls LAUNCH::call<T, HEAD_DIM> for the dtype and head_dim of the call, or refuses it.  `features` are those of enum FaFeature
// that the kernel takes.
template <typename LAUNCH>
int launch_instantiation(const FaForwardArgs* args, cudaStream_t stream, uint32_t features) {
  if (int status = fa_check_features(args, features)) return status;
#define FA_LAUNCH_IF(DTYPE, HEAD_DIM) \
  if (args->dtype == FA_DTYPE_##DTYPE && args->head_dim == HEAD_DIM) return LAUNCH::template call<DTYPE, HEAD_DIM>(args, stream);
  FA_FOR_EACH_INSTANTIATION(FA_LAUNCH_IF)
#undef FA_LAUNCH_IF
  return fa_refuse(args, "no instantiation for dtype %d with head_dim %lld", args->dtype, static_cast<long long>(args->head_dim));
}

}  // namespace fa

// Defines fa_forward by a function template `int LAUNCH<T, HEAD_DIM>(const FaForwardArgs*, cudaStream_t)`.
#define FA_FORWARD(LAUNCH) FA_FORWARD_WITH(0, LAUNCH)

// The same for a kernel that takes some of enum FaFeature.
#define FA_FORWARD_WITH(FEATURES, LAUNCH)                                      \
  struct FaLaunch {                                                            \
    template <typename T, int HEAD_DIM>                                        \
    static int call(const FaForwardArgs* args, cudaStream_t stream) {          \
      return LAUNCH<T, HEAD_DIM>(args, stream);                                \
    }                                                                          \
  };                                                                           \
  FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {   \
    return fa::launch_instantiation<FaLaunch>(args, stream, FEATURES);         \
  }
