// NAME: what the binding knows of the kernel.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

constexpr int HEAD_DIM = 64;

void launch_attention(const void* q, const void* k, const void* v, void* out, int64_t heads, int64_t seq_q, int64_t seq_k,
                      float scale, bool causal, cudaStream_t stream);
