// NAME: the interface between binding.cpp and kernel.cu.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

constexpr int HEAD_DIM = 64;

// Launches the kernel on `stream`.  All tensors are contiguous fp16: q and out [heads, seq_q, HEAD_DIM], k and v
// [heads, seq_k, HEAD_DIM], where `heads` is batch * heads.
void launch_attention(const void* q, const void* k, const void* v, void* out, int64_t heads, int64_t seq_q, int64_t seq_k,
                      float scale, bool causal, cudaStream_t stream);
