"""Measurements on a GPU: known durations, launches, cold time, launch overhead and the profiler's agreement."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.device_tools import device_tools
from pytest_fa.gpu.graph_nodes import CALLS as NODE_CALLS
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.fresh_data import FreshData, Written, stacked
from pytest_fa.judge.clocks.launch_overhead import calls_of_graph, period_of_spin_us
from pytest_fa.judge.clocks.measure import l2_bytes, measure
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import make_truth
from pytest_fa.records.agreement import check_agreement
from pytest_fa.records.environment import clock_monitor
from pytest_fa.records.timing import LaunchedKernel, Speed
from pytest_fa.wire.jobs import ProfilerJob
from tests.device.conftest import BuildSource, Built

CASE = parse_case("b1h8s512d64-fp16-seed0")

SPIN = """
__global__ void spin_kernel(long long cycles) {
  extern __shared__ char smem[];
  for (const long long start = clock64(); clock64() - start < cycles;) {}
  if (cycles < 0) smem[0] = 1;
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  spin_kernel<<<132, 64, 1024, stream>>>(static_cast<long long>(args->scale));
  return static_cast<int>(cudaPeekAtLastError());
}
"""


def candidate_of(built: Built) -> Candidate:
    """A candidate that runs a build in this process."""
    return Candidate.of_function(load_forward(*built), "cuda")


def inputs_of_case() -> Inputs:
    """The case's inputs on the GPU."""
    return make_inputs(CASE, torch.device("cuda"))


def measured(built: Built) -> tuple[Speed, list[Written]]:
    """The times of a build on the case, and what some timed calls wrote."""
    return measure(candidate_of(built), CASE, inputs_of_case())


def test_device_time_follows_a_known_duration(build_source: BuildSource) -> None:
    """Kernels that spin for 20,000 and 40,000 cycles differ by those cycles at the SM clock, within 5 %."""
    spin, inputs = candidate_of(build_source("spin", SPIN)), inputs_of_case()
    speeds = [measure(spin, CASE, inputs._replace(scale=cycles))[0] for cycles in (20_000.0, 40_000.0)]
    clocks = [speed.clocks_after for speed in speeds]
    assert clocks[0] is not None and clocks[1] is not None  # noqa: PT018
    difference_us = speeds[1].device.median_us - speeds[0].device.median_us
    expected_us = 20_000 / clocks[1].sm_mhz
    assert abs(difference_us / expected_us - 1) < 0.05


def test_launches_are_read_from_the_graph(build_source: BuildSource) -> None:
    """The launches of a call have the kernel's name, grid, block and dynamic shared memory."""
    spin = candidate_of(build_source("spin", SPIN))
    speed, _ = measure(spin, CASE, inputs_of_case()._replace(scale=100.0))
    (launch,) = speed.launches
    assert (launch.mangled, launch.grid, launch.block, launch.dynamic_smem_bytes, launch.count) == (
        "_Z11spin_kernelx",
        (132, 1, 1),
        (64, 1, 1),
        1024,
        1,
    )


def test_timed_outputs_come_back(minimal: Built) -> None:
    """`measure` returns heads that timed calls wrote, each with other inputs, and they are right for these inputs."""
    _, written = measured(minimal)
    inputs, out = stacked(written)
    assert check_output(out.out, make_truth(inputs), "same_precision").passed
    assert len({head.inputs.q.flatten()[0].item() for head in written}) > len(written) // 2


def test_the_clock_of_the_judge_agrees(minimal: Built) -> None:
    """The judge's slope, whole run and proof sample confirm the period by CUDA events."""
    speed, _ = measured(minimal)
    assert speed.outside is not None
    assert speed.outside.proof_calls is not None
    agreement = check_agreement("minimal", "candidate", speed)
    assert agreement.valid is None, agreement.reason  # no clock contradicts it, and there is no profiler time


def test_periods_grow_as_the_gpu_clock_says(record_property: Callable[[str, object], None]) -> None:
    """The period of kernels that spin for 2 to 32 us grows by their spin time on the GPU's own clock, within 1 %."""
    tools = device_tools(0)
    geometry = (LaunchedKernel("spin", (132, 1, 1), (128, 1, 1), 0),)
    with clock_monitor("cuda") as clocks:
        waits_us, periods_us = (2.0, 4.0, 8.0, 16.0, 32.0), []
        for wait_us in waits_us:
            spin = partial(tools.spin_like, geometry, int(wait_us * tools.cycles_per_us))
            periods_us.append(period_of_spin_us(spin, calls_of_graph(wait_us), lambda: None))
        now = clocks.now()
    assert now is not None
    slope = float(np.polyfit(waits_us, periods_us, 1)[0]) * now.sm_mhz / tools.cycles_per_us
    record_property("slope", slope)
    record_property("periods_us", periods_us)
    assert abs(slope - 1) <= 0.01


def test_cold_time_and_launch_overhead_are_plausible(minimal: Built) -> None:
    """The cold time is above the period, the launch overhead is below 1/20 of it, and the nodes form a chain."""
    speed, _ = measured(minimal)
    assert speed.cold is not None
    assert speed.launch_overhead_us is not None
    assert speed.cold.median_us > speed.device.median_us > 20 * speed.launch_overhead_us > 0
    assert (speed.order, speed.other_nodes, speed.clocks_during is not None) == ("chain", {}, True)
    assert speed.device.precision is not None
    assert speed.device.precision < 0.01


def profiler_job(built: Built, device_us: float) -> ProfilerJob:
    """A job that profiles a build at the case of these tests, and judges what its calls wrote."""
    return ProfilerJob(built[0], CASE, built[1], "same_precision", True, device_us)


WRITES_ZEROS = """
__global__ void fill(unsigned short* out, unsigned short bits, int64_t count) {
  const int64_t first = blockIdx.x * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < count; i += step) out[i] = bits;
}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  const int64_t count = args->batch * args->heads * args->seq_q * args->head_dim;
  fill<<<8, 256, 0, stream>>>(static_cast<unsigned short*>(args->out), 0, count);
  return static_cast<int>(cudaPeekAtLastError());
}
"""


def test_profiled_calls_are_judged(build_source: BuildSource) -> None:
    """A kernel whose profiled calls write something else than attention has no time by the profiler."""
    built = build_source("writes_zeros", WRITES_ZEROS)
    with ProfilerWorkers() as workers:
        result = workers.run_profiler(profiler_job(built, 5.0))
    assert result.profiler is None
    assert "in an output of the profiled calls" in (result.missing or "")


def test_the_profiler_agrees(minimal: Built) -> None:
    """The profiler's durations, read in another worker, agree with the period of a long kernel."""
    speed, _ = measured(minimal)
    with ProfilerWorkers() as workers:
        result = workers.run_profiler(profiler_job(minimal, speed.device.median_us))
    assert (result.missing, result.profiler is not None) == (None, True)
    assert result.profiler is not None
    assert (result.profiler.missing_count, result.profiler.clocks is not None) == (0, True)
    agreement = check_agreement("minimal", "candidate", msgspec.structs.replace(speed, profiler=result.profiler))
    assert agreement.valid, agreement.reason


def test_a_prepared_profiler_answers_soon(minimal: Built, record_property: Callable[[str, object], None]) -> None:
    """A process that is ready profiles the first call of a variant as well as a later one, without its own start."""
    job = profiler_job(minimal, measured(minimal)[0].device.median_us)
    with ProfilerWorkers() as workers:
        workers.prepare()
        begun = time.perf_counter()
        workers.wait_until_prepared()
        prepared = time.perf_counter()
        first = workers.run_profiler(job)
        profiled = time.perf_counter()
        second = workers.run_profiler(job)
    record_property("prepare_s", prepared - begun)
    record_property("first_s", profiled - prepared)
    assert (first.missing, second.missing) == (None, None)
    assert first.profiler is not None
    assert second.profiler is not None
    assert first.profiler.profiler_us == pytest.approx(second.profiler.profiler_us, rel=0.02)
    assert profiled - prepared < 2.5


FORKS = """
__global__ void one_kernel(unsigned short* out) { out[threadIdx.x] = 0; }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  cudaStream_t beside;
  cudaEvent_t before, after;
  if (cudaError_t status = cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking)) return status;
  if (cudaError_t status = cudaEventCreateWithFlags(&before, cudaEventDisableTiming)) return status;
  if (cudaError_t status = cudaEventCreateWithFlags(&after, cudaEventDisableTiming)) return status;
  cudaEventRecord(before, stream);
  cudaStreamWaitEvent(beside, before, 0);
  one_kernel<<<1, 32, 0, beside>>>(static_cast<unsigned short*>(args->out));
  one_kernel<<<1, 32, 0, stream>>>(static_cast<unsigned short*>(args->out));
  cudaEventRecord(after, beside);
  cudaStreamWaitEvent(stream, after, 0);
  return static_cast<int>(cudaPeekAtLastError());
}
"""

OVERLAPS = """
__global__ void one_kernel(unsigned short* out) { out[threadIdx.x] = 0; }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  auto* out = static_cast<unsigned short*>(args->out);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = 1, config.blockDim = 32, config.stream = stream, config.attrs = &early, config.numAttrs = 1;
  one_kernel<<<1, 32, 0, stream>>>(out);
  return static_cast<int>(cudaLaunchKernelEx(&config, one_kernel, out));
}
"""


@pytest.mark.parametrize(
    ("name", "source", "order"),
    [("forks", FORKS, "branches"), ("overlaps", OVERLAPS, "programmatic")],
    ids=["forks", "overlaps"],
)
def test_branches_and_programmatic_launches_are_detected(
    build_source: BuildSource, name: str, source: str, order: str
) -> None:
    """Parallel kernels, and a kernel that may begin before its predecessor ends, are distinguished from a chain."""
    candidate = candidate_of(build_source(name, source))
    data = FreshData(candidate, CASE, inputs_of_case(), l2_bytes(candidate.device))
    candidate.prepare("nodes", data.series(NODE_CALLS))
    captured = candidate.capture("nodes")
    assert (captured.launches_missing, captured.order) == (None, order)
