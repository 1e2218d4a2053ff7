"""Kernels that would deceive a judge in their own process: they keep results, are rarely wrong, or end.

Each runs as users run it: the kernel in the candidate's process, the verdict in the judge's.
"""

from __future__ import annotations

import pytest
import torch

from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.graphs import event_us
from pytest_fa.gpu.inputs import make_inputs, poisoned_output
from pytest_fa.host.client import Workers
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.device.conftest import BuildSource, Built

CASE = parse_case("b1h2s64d64-fp16-seed0")
SHORT_CASE = parse_case("b1h1s32d64-fp16-seed0")

# One thread computes one query row; q, k and v are contiguous.  `seen_keys` is less than seq_k where a tile is dropped.
ATTENTION = """
#include <cuda_fp16.h>
#include <math_constants.h>

constexpr int HEAD_DIM = 64;

__device__ void attend(const FaForwardArgs& args, int64_t row, int64_t seen_keys, __half* out_row) {
  const int64_t head = row / args.seq_q;
  const __half* q = static_cast<const __half*>(args.q) + row * HEAD_DIM;
  const __half* k = static_cast<const __half*>(args.k) + head * args.seq_k * HEAD_DIM;
  const __half* v = static_cast<const __half*>(args.v) + head * args.seq_k * HEAD_DIM;
  float o[HEAD_DIM] = {}, m = -CUDART_INF_F, l = 0.0f;
  for (int64_t key = 0; key < seen_keys; ++key) {
    float s = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) s += __half2float(q[d]) * __half2float(k[key * HEAD_DIM + d]);
    const float m_new = fmaxf(m, s * args.scale), rescale = expf(m - m_new), p = expf(s * args.scale - m_new);
    m = m_new, l = l * rescale + p;
    for (int d = 0; d < HEAD_DIM; ++d) o[d] = o[d] * rescale + p * __half2float(v[key * HEAD_DIM + d]);
  }
  for (int d = 0; d < HEAD_DIM; ++d) out_row[d] = __float2half_rn(o[d] / l);
}

int blocks_of(const FaForwardArgs* args) { return int((args->batch * args->heads * args->seq_q + 31) / 32); }
"""

HONEST = (
    ATTENTION
    + """
__global__ void honest_kernel(const FaForwardArgs args) {
  const int64_t row = blockIdx.x * 32 + threadIdx.x;
  if (row < args.batch * args.heads * args.seq_q) {
    attend(args, row, args.seq_k, static_cast<__half*>(args.out) + row * HEAD_DIM);
  }
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  honest_kernel<<<blocks_of(args), 32, 0, stream>>>(*args);
  return static_cast<int>(cudaPeekAtLastError());
}
"""
)

# Keeps up to 64 outputs, by 128 sampled elements of each of q, k and v.  A call whose samples are known copies the kept
# output.  All of it is on the device, so that calls can be captured.
KEEPS = (
    ATTENTION
    + """
constexpr int SAMPLES = 128, ENTRIES = 64, MAX_ELEMENTS = 2 * 64 * HEAD_DIM;
__device__ unsigned short sampled[ENTRIES][3 * SAMPLES];
__device__ __half kept[ENTRIES][MAX_ELEMENTS];
__device__ int entry_count, hit, slot;

__global__ void look_up(const FaForwardArgs args) {
  const void* tensors[3] = {args.q, args.k, args.v};
  const int64_t rows[3] = {args.seq_q, args.seq_k, args.seq_k};
  const int tensor = threadIdx.x / SAMPLES;
  const int64_t step = args.batch * args.heads * rows[tensor] * HEAD_DIM / SAMPLES;
  const auto* elements = static_cast<const unsigned short*>(tensors[tensor]);
  const unsigned short sample = elements[threadIdx.x % SAMPLES * step];
  int match = -1;
  for (int entry = 0; entry < min(entry_count, ENTRIES); ++entry) {
    if (__syncthreads_and(sample == sampled[entry][threadIdx.x])) match = entry;
  }
  const int target = entry_count % ENTRIES;
  __syncthreads();
  if (match < 0) sampled[target][threadIdx.x] = sample;
  if (threadIdx.x == 0) {
    hit = match, slot = target;
    if (match < 0) ++entry_count;
  }
}

__global__ void copy_or_compute(const FaForwardArgs args) {
  const int64_t row = blockIdx.x * 32 + threadIdx.x;
  if (row >= args.batch * args.heads * args.seq_q) return;
  __half* out = static_cast<__half*>(args.out) + row * HEAD_DIM;
  __half* entry = kept[hit < 0 ? slot : hit] + row * HEAD_DIM;
  if (hit < 0) attend(args, row, args.seq_k, entry);
  for (int d = 0; d < HEAD_DIM; ++d) out[d] = entry[d];
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (args->batch * args->heads * args->seq_q * HEAD_DIM > MAX_ELEMENTS) return fa_refuse(args, "too large");
  look_up<<<1, 3 * SAMPLES, 0, stream>>>(*args);
  copy_or_compute<<<blocks_of(args), 32, 0, stream>>>(*args);
  return static_cast<int>(cudaPeekAtLastError());
}
"""
)

# In one call of 2,000, the second half of the keys is left out.
DROPS = (
    ATTENTION
    + """
__device__ unsigned calls;
__global__ void count_call() { ++calls; }
__global__ void drops_kernel(const FaForwardArgs args) {
  const int64_t row = blockIdx.x * 32 + threadIdx.x;
  const int64_t seen_keys = calls % 2000 == 0 ? args.seq_k / 2 : args.seq_k;
  if (row < args.batch * args.heads * args.seq_q) {
    attend(args, row, seen_keys, static_cast<__half*>(args.out) + row * HEAD_DIM);
  }
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  count_call<<<1, 1, 0, stream>>>();
  drops_kernel<<<blocks_of(args), 32, 0, stream>>>(*args);
  return static_cast<int>(cudaPeekAtLastError());
}
"""
)

ENDS = (
    "#include <unistd.h>\n"
    + ATTENTION
    + """
__global__ void honest_kernel(const FaForwardArgs args) {
  const int64_t row = blockIdx.x * 32 + threadIdx.x;
  if (row < args.batch * args.heads * args.seq_q) {
    attend(args, row, args.seq_k, static_cast<__half*>(args.out) + row * HEAD_DIM);
  }
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  static int calls = 0;
  if (++calls == 50) _exit(0);
  honest_kernel<<<blocks_of(args), 32, 0, stream>>>(*args);
  return static_cast<int>(cudaPeekAtLastError());
}
"""
)

MANIFEST = """\
step: a test's variant
because: a test needs one
expect: what the test asserts
supports: {dtype: [fp16]}
"""


@pytest.fixture
def build(build_source: BuildSource) -> BuildSource:
    """`build("name", source)`: build a source that takes only fp16, contiguous, without a mask."""
    return lambda name, source: build_source(name, source, MANIFEST)


def job_of(built: Built, *, time: bool = False, repeats: int | None = 0) -> CaseJob:
    """A judged job on the case; on a shorter one if it is not timed and repeated."""
    variant, library = built
    case = CASE if time or repeats == 0 else SHORT_CASE
    return CaseJob(variant, case, library, "cuda", "same_precision", checks_output=True, time=time, repeats=repeats)


def judged(built: Built, *, time: bool = False, repeats: int | None = 0) -> CaseResult:
    """The result of a job in new processes."""
    with Workers() as workers:
        return workers.run(job_of(built, time=time, repeats=repeats))


@pytest.mark.quiet_gpu
def test_a_kernel_that_keeps_results_gains_nothing(build: BuildSource) -> None:
    """A kernel that keeps outputs by sampled inputs is wrong, or not faster than the same kernel without that."""
    honest, keeps = judged(build("honest", HONEST), time=True), judged(build("keeps", KEEPS), time=True)
    assert (honest.outcome, honest.message) == ("ok", "")
    assert honest.speed is not None
    if keeps.outcome == "ok":
        assert keeps.speed is not None
        assert keeps.speed.device.median_us > 0.98 * honest.speed.device.median_us
        assert keeps.speed.call.median_us > 0.9 * honest.speed.call.median_us
    else:
        assert (keeps.outcome, keeps.caught_by) == ("wrong", ("timed outputs",))


@pytest.mark.quiet_gpu
def test_that_kernel_is_fast_on_the_same_data(build: BuildSource) -> None:
    """On the same data again and again, that kernel takes less than half of the time of the honest one."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    out = poisoned_output(inputs)
    times_us = []
    for name, source in (("honest", HONEST), ("keeps", KEEPS)):
        forward = load_forward(*build(name, source))

        def call(forward: object = forward) -> object:
            assert callable(forward)
            return forward(inputs.q, inputs.k, inputs.v, scale=inputs.scale, out=out)

        call()
        times_us.append(event_us(call, 50) / 50)
    assert times_us[1] < 0.5 * times_us[0], times_us


def test_a_tile_that_is_dropped_once_in_2000_calls_is_found(build: BuildSource) -> None:
    """The default number of repeats finds it; 100 repeats do not."""
    drops = build("drops", DROPS)
    few, default = judged(drops, repeats=100), judged(drops, repeats=None)
    assert few.outcome == "ok"
    assert (default.outcome, default.caught_by) == ("wrong", ("repeats",))
    assert default.repeats is not None
    assert default.repeats.count > 2000
    assert default.repeats.differing == (default.repeats.count + 1) // 2000


def test_a_candidate_that_ends_costs_one_job(build: BuildSource, minimal: Built) -> None:
    """A kernel that ends its process with status 0 in the middle of its repeats is a failure; the next job passes."""
    ends = build("ends", ENDS)
    with Workers() as workers:
        results = [workers.run(job_of(ends, repeats=None)), workers.run(job_of(minimal, repeats=None))]
    assert [result.outcome for result in results] == ["crashed", "ok"]
    assert results[0].caught_by == ("isolation",)


def test_two_processes_give_the_same_bits(minimal: Built) -> None:
    """Judge and candidate in two processes see the same inputs and the same output as a call in one process."""
    apart, together = judged(minimal), run_case(job_of(minimal))
    assert (apart.outcome, together.outcome) == ("ok", "ok")
    assert apart.fingerprints is not None
    assert apart.fingerprints == together.fingerprints
    assert apart.check == together.check
