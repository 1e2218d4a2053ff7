"""fp32: right and wrong kernels in the style of tutorials get the right verdict, and CUDA kernels for float compile."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_SOURCE
from tests.projects import Project

CASES = "--fa-case=b1h2s65d64-fp32-causal-seed0,b1h2s64d64-fp32-seed0"

PYTHON_MANIFEST = """\
step: softmax over a full row
because: the first kernel of a tutorial
expect: correct and slow
entry: {kind: python, target: "entry:forward"}
supports: {device: [cpu, cuda], dtype: [fp32], causal: [none, top_left]}
"""

# P is rounded to 10 bits, as by a tensor core that was allowed to use tf32.
TF32_SOURCE = """\
import torch


def tf32(x):
    return (x.contiguous().view(torch.int32) + 0x1000 >> 13 << 13).view(torch.float32)


def forward(q, k, v, *, scale, causal="none", out=None):
    scores = q @ k.transpose(2, 3) * scale
    if causal == "top_left":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    result = tf32(torch.softmax(scores, -1)) @ tf32(v)
    return result if out is None else out.copy_(result)
"""

# As in tutorials: float pointers, tiles of K and V in shared memory, one thread per query, __expf, contiguous tensors.
CUDA_SOURCE = """\
#include <math_constants.h>

#include "fa_forward.h"

constexpr int Bc = 32, Br = 32, D = 64;

__global__ void flash(const float* Q, const float* K, const float* V, float* O, int N, float scale, bool causal) {
  __shared__ float Kj[Bc][D], Vj[Bc][D];
  const int i = blockIdx.x * Br + threadIdx.x;
  const size_t head = size_t(blockIdx.y) * N * D;
  float q[D], o[D] = {}, m = -CUDART_INF_F, l = 0.0f;
  for (int d = 0; d < D; ++d) q[d] = i < N ? Q[head + size_t(i) * D + d] : 0.0f;
  for (int j = 0; j < N; j += Bc) {
    for (int x = threadIdx.x; x < Bc * D; x += Br) {
      const int row = j + x / D;
      Kj[x / D][x % D] = row < N ? K[head + size_t(row) * D + x % D] : 0.0f;
      Vj[x / D][x % D] = row < N ? V[head + size_t(row) * D + x % D] : 0.0f;
    }
    __syncthreads();
    for (int y = 0; y < Bc && j + y < N && !(causal && j + y > i); ++y) {
      float s = 0.0f;
      for (int d = 0; d < D; ++d) s += q[d] * Kj[y][d];
      s *= scale;
      const float m_new = fmaxf(m, s), rescale = __expf(m - m_new), p = __expf(s - m_new);
      l = l * rescale + p;
      for (int d = 0; d < D; ++d) o[d] = o[d] * rescale + p * Vj[y][d];
      m = m_new;
    }
    __syncthreads();
  }
  if (i < N) {
    for (int d = 0; d < D; ++d) O[head + size_t(i) * D + d] = o[d] / l;
  }
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_check_abi(args)) return status;
  const bool is_dense = args->q_stride.seq == D && args->q_stride.head == args->seq_q * D;
  if (args->dtype != FA_DTYPE_fp32 || args->head_dim != D || args->seq_q != args->seq_k || !is_dense) {
    return fa_refuse(args, "only contiguous fp32 tensors of equal length with head_dim 64");
  }
  const dim3 grid((args->seq_q + Br - 1) / Br, args->batch * args->heads);
  flash<<<grid, Br, 0, stream>>>((const float*)args->q, (const float*)args->k, (const float*)args->v, (float*)args->out,
                                 (int)args->seq_q, args->scale, args->causal != FA_CAUSAL_NONE);
  return cudaPeekAtLastError();
}
"""
CUDA_MANIFEST = """\
step: flash attention as in tutorials
because: most first kernels are written in float
expect: correct and slow
supports: {dtype: [fp32], causal: [none, top_left]}
"""


@pytest.mark.nightly
def test_verdicts_on_a_cpu(project: Project) -> None:
    """A right fp32 kernel passes; one with a wrong scale and one that rounds to tf32 undeclared are wrong."""
    project.python_variant("right", PYTHON_SOURCE, PYTHON_MANIFEST)
    project.python_variant("scaled", PYTHON_SOURCE.replace("* scale", "* scale * 1.001"), PYTHON_MANIFEST)
    project.python_variant("secret", TF32_SOURCE, PYTHON_MANIFEST)
    project.python_variant("declared", TF32_SOURCE, PYTHON_MANIFEST + "rounds: [tf32]\n")

    run = project.suite("--fa-variant=right,scaled,secret,declared", CASES, "-k", "test_correct")

    verdicts = {name.split("[")[1].split("-")[0]: outcome for name, outcome in run.outcomes.items()}
    assert verdicts == {"right": "passed", "scaled": "failed", "secret": "failed", "declared": "passed"}
    assert {record.outcome for record in project.records if record.variant in ("scaled", "secret")} == {"wrong"}


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_tutorial_kernel_compiles(project: Project) -> None:
    """A float kernel in the style of tutorials needs only `fa_forward`, and compiles without spills."""
    project.cuda_variant("tutorial", CUDA_SOURCE, CUDA_MANIFEST)

    run = project.suite("--fa-variant=tutorial", "-k", "test_build and tutorial")

    assert run.outcomes == {"test_build[tutorial]": "passed"}
    (record,) = project.records
    assert {kernel.spill_bytes for build in record.builds for kernel in build.kernels} == {0}


def test_tf32_needs_fp32(project: Project) -> None:
    """`rounds: [tf32]` in a manifest without fp32 is refused, and the error says what to write."""
    manifest = PYTHON_MANIFEST.replace("[fp32]", "[fp16]") + "rounds: [tf32]\n"
    project.python_variant("mine", PYTHON_SOURCE, manifest)

    run = project.suite("--fa-variant=mine", "--fa-case=b1h2s64d64-fp16-seed0")

    assert "rounds has 'tf32', which applies to fp32; supports.dtype is fp16; add fp32 or drop 'tf32'" in run.text
