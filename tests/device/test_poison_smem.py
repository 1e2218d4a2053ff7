"""NaN-filled shared memory: it reaches every multiprocessor, and a kernel that reads unwritten memory is caught."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.device_tools import device_tools
from pytest_fa.gpu.guards import NAN_PATTERN
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob
from tests.device.conftest import BuildSource

CASE = parse_case("b1h1s64d64-fp16-seed0")

# Reads the first `scale` words of shared memory without writing them, and writes the fraction that equals the NaN
# pattern to out, one element per block.
PROBE = f"""
#include <cuda_fp16.h>
__global__ void kernel(int words, __half* share) {{
  extern __shared__ volatile unsigned smem[];
  __shared__ int matches;
  if (threadIdx.x == 0) matches = 0;
  __syncthreads();
  int count = 0;
  for (int i = threadIdx.x; i < words; i += blockDim.x) count += smem[i] == 0x{NAN_PATTERN << 16 | NAN_PATTERN:08X}u;
  atomicAdd(&matches, count);
  __syncthreads();
  if (threadIdx.x == 0) share[blockIdx.x] = __float2half(float(matches) / words);
}}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {{
  const int words = int(args->scale), bytes = words * 4;
  if (int status = fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(&kernel), bytes)) return status;
  kernel<<<132, 256, bytes, stream>>>(words, static_cast<__half*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}}
"""

# With one key, the output is V's only row.  This kernel adds unwritten shared memory, or an unwritten workspace, times
# zero: the output is right unless that memory holds NaN or Inf.
MIXES = """
#include <cuda_fp16.h>
__global__ void kernel(const __half* v, const unsigned short* workspace, __half* out) {
  extern __shared__ volatile unsigned short smem[];
  const unsigned short left = workspace == nullptr ? smem[threadIdx.x] : workspace[threadIdx.x];
  out[threadIdx.x] = __float2half(__half2float(v[threadIdx.x]) + __half2float(__ushort_as_half(left)) * 0.0f);
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  const auto* v = static_cast<const __half*>(args->v);
  const auto* workspace = static_cast<const unsigned short*>(args->workspace);
  kernel<<<1, 64, 2048, stream>>>(v, workspace, static_cast<__half*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}
"""
NEEDS_WORKSPACE = "FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs*) { return 128; }\n"


def test_every_multiprocessor_is_reached() -> None:
    """`poison_smem` runs exactly one block on each multiprocessor, in each of 20 launches."""
    tools = device_tools(0)
    for _ in range(20):
        ids = torch.full((tools.multiprocessors,), -1, dtype=torch.int32, device="cuda")
        tools.poison_smem(ids)
        assert sorted(ids.tolist()) == list(range(tools.multiprocessors))


@pytest.mark.parametrize("kib", [1, 16, 48, 100, 164, 220])
def test_a_kernel_reads_nan_in_all_its_shared_memory(build_source: BuildSource, kib: int) -> None:
    """For any size of a kernel's shared memory, all of it holds the NaN pattern on every multiprocessor."""
    probe = load_forward(*build_source("probe_smem", PROBE))
    inputs = make_inputs(CASE, torch.device("cuda"))
    out = torch.zeros_like(inputs.q)
    words = kib * 256
    probe(inputs.q, inputs.k, inputs.v, scale=float(words), out=out)
    device_tools(0).poison_smem()
    probe(inputs.q, inputs.k, inputs.v, scale=float(words), out=out)
    assert out.flatten()[:132].tolist() == [1.0] * 132


@pytest.mark.parametrize(
    ("name", "source"), [("reads_smem", MIXES), ("reads_workspace", MIXES + NEEDS_WORKSPACE)], ids=["smem", "workspace"]
)
def test_a_read_of_unwritten_memory_gives_nan(build_source: BuildSource, name: str, source: str) -> None:
    """A kernel that reads shared memory or a workspace that it never wrote gives NaN, and the result is `wrong`."""
    variant, library = build_source(name, source)
    case = parse_case("b1h1s1d64-fp16-seed0")
    job = CaseJob(variant, case, library, "cuda", "same_precision", checks_output=True, time=False, repeats=3)
    result = run_case(job)
    assert (result.outcome, "NaN" in result.message) == ("wrong", True)
    assert result.repeats is not None
    assert result.repeats.why_no_smem_poison is None
