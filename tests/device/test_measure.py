"""What is measured on a GPU."""

from __future__ import annotations

import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.measure.measure import measure
from pytest_fa.run.inputs import make_inputs
from pytest_fa.run.module import load_forward
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


def test_device_time_follows_a_known_duration(build_source: BuildSource) -> None:
    """Kernels that spin for 20,000 and 40,000 cycles differ by those cycles at the SM clock, within 5 %."""
    spin = load_forward(*build_source("spin", SPIN))
    inputs = make_inputs(CASE, torch.device("cuda"))
    speeds = [measure(spin, CASE, inputs._replace(scale=cycles), CASE.id)[0] for cycles in (20_000.0, 40_000.0)]
    clocks = [speed.clocks_after for speed in speeds]
    assert clocks[0] is not None and clocks[1] is not None  # noqa: PT018
    found_us = speeds[1].device.median_us - speeds[0].device.median_us
    want_us = 20_000 / clocks[1].sm_mhz
    assert abs(found_us / want_us - 1) < 0.05


def test_launches_are_read_from_the_graph(build_source: BuildSource) -> None:
    """A call's kernels are named, with grid, block and dynamic shared memory."""
    spin = load_forward(*build_source("spin", SPIN))
    inputs = make_inputs(CASE, torch.device("cuda"))._replace(scale=100.0)
    speed, _ = measure(spin, CASE, inputs, CASE.id)
    (launch,) = speed.launches
    assert (launch.mangled, launch.grid, launch.block, launch.dynamic_smem_bytes, launch.count) == (
        "_Z11spin_kernelx",
        (132, 1, 1),
        (64, 1, 1),
        1024,
        1,
    )


def test_timed_outputs_come_back(minimal: Built) -> None:
    """Every buffer of the rotation holds an output of a timed call, none of them poison."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    speed, outputs = measure(load_forward(*minimal), CASE, inputs, CASE.id)
    assert (0 < len(outputs) <= speed.buffers, all(bool(out.isfinite().all()) for out in outputs)) == (True, True)
