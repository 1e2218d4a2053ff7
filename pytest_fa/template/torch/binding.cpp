// NAME: the function that Python calls.  Only this file includes headers of PyTorch, and only those that it needs, because
// they take most of the compile time.  With torch/extension.h, which includes all of them, it takes twice as long.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include "kernel.h"

// q and out: [batch, heads, seq_q, 64] fp16, k and v: [batch, heads, seq_k, 64] fp16, all contiguous.
void forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor out, double scale, bool causal) {
  TORCH_CHECK(q.is_cuda() && q.scalar_type() == at::kHalf && q.size(3) == HEAD_DIM, "q must be fp16 of head_dim 64 on a GPU");
  TORCH_CHECK(q.is_contiguous() && k.is_contiguous() && v.is_contiguous() && out.is_contiguous(), "tensors must be contiguous");
  TORCH_CHECK(q.size(1) == k.size(1), "k must have as many heads as q");
  const c10::cuda::CUDAGuard guard(q.device());
  launch_attention(q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), out.mutable_data_ptr(), q.size(0) * q.size(1),
                   q.size(2), k.size(2), static_cast<float>(scale), causal, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_CHECK(cudaGetLastError());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("forward", &forward); }
