"""Measure a GPU's ceilings: copy bandwidth, matmul rate and the period of empty launches.

They are taken with the same clock as kernels' times: CUDA events around graph replays.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import ScalingType, scaled_mm

from pytest_fa.errors import FaError
from pytest_fa.gpu.device_tools import device_tools
from pytest_fa.gpu.graphs import capture, event_us
from pytest_fa.gpu.quantised import E4M3
from pytest_fa.judge.clocks.launch_overhead import EMPTY_US, calls_of_graph, launch_overhead_us
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.environment import ClockMonitor, clock_monitor, read_environment
from pytest_fa.records.sampling import sample_until_precise, settle, timing
from pytest_fa.records.source import read_source
from pytest_fa.records.timing import LaunchedKernel, Timing

COPY_BYTES = 2**31
L2_COPIES = (16, 5)  # a copy within L2 has this part of L2 as its source, once with few bytes and once with many
MATRIX = 8192
MEMORY_COPIES = ("copy by the driver", "copy by a kernel")
FEW_BYTES, MANY_BYTES = "copy of few bytes within L2", "copy of many bytes within L2"
MATMULS = {"fp16": torch.float16, "bf16": torch.bfloat16}
MATMUL = "matmul "  # and a dtype: the name of a product's times
E4M3_FROM = (8, 9)  # the first compute capability whose matrix units take e4m3
EMPTY = LaunchedKernel("empty", (1, 1, 1), (32, 1, 1), 0)


class NoGpu(FaError):
    """This machine has no GPU whose ceilings could be measured."""


def measure_ceilings(root: Path) -> Ceilings:
    """Time copies of 2 GiB, copies within L2, products of 8192 x 8192 matrices and empty kernels, in about 6 s.

    Matrices are random, because the GPU clocks higher on zeros.  Raises `NoGpu` if this machine has no GPU.
    """
    if not torch.cuda.is_available():
        raise NoGpu("this machine has no GPU whose ceilings could be measured")
    timings: dict[str, Timing] = {}
    with clock_monitor("cuda") as clocks:
        source = torch.randn(COPY_BYTES // 4, device="cuda")
        target = torch.empty_like(source)
        timings["copy by the driver"] = _time(lambda: target.copy_(source), clocks)
        timings["copy by a kernel"] = _time(lambda: torch.neg(source, out=target), clocks)
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        few, many = (l2_bytes // part // 4 for part in L2_COPIES)  # elements
        for name, count in {FEW_BYTES: few, MANY_BYTES: many}.items():
            timings[name] = _time(lambda n=count: torch.neg(source[:n], out=target[:n]), clocks)  # type: ignore[misc]
        for name, product in _products(torch.cuda.get_device_capability()).items():
            timings[f"{MATMUL}{name}"] = _time(product, clocks)
        product()
        during = clocks.now()
        torch.cuda.synchronize()
        calls = calls_of_graph(EMPTY_US)
        empty_us = [launch_overhead_us(device_tools(0), (EMPTY,), lambda: None) for _ in range(5)]
        timings["empty launch"] = timing(
            f"slope between graphs of {calls} and {3 * calls} empty kernels", empty_us, 4 * calls
        )
    matmuls = {name: timed for name, timed in timings.items() if name.startswith(MATMUL)}
    rates = {name.removeprefix(MATMUL): 2 * MATRIX**3 / timed.median_us / 1e6 for name, timed in matmuls.items()}
    extra_us = timings[MANY_BYTES].median_us - timings[FEW_BYTES].median_us
    return Ceilings(
        copy_gb_per_s=2 * COPY_BYTES / min(timings[name].median_us for name in MEMORY_COPIES) / 1e3,
        matmul_tflops=rates,
        empty_launch_us=timings["empty launch"].median_us,
        timings=timings,
        clocks_during=during,
        environment=read_environment(),
        source=read_source(root),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        l2_copy_gb_per_s=2 * 4 * (many - few) / extra_us / 1e3 if extra_us > 0 else None,
    )


def _products(capability: tuple[int, int], device: str = "cuda", size: int = MATRIX) -> dict[str, Callable[[], object]]:
    """For each dtype that the GPU's matrix units take, a product of two random matrices."""

    def random() -> torch.Tensor:
        return torch.randn(size, size, device=device)

    products: dict[str, Callable[[], object]] = {}
    for name, dtype in MATMULS.items():
        products[name] = partial(torch.mm, random().to(dtype), random().to(dtype))
    if capability >= E4M3_FROM:
        one = torch.ones((), device=device)
        products["e4m3"] = partial(_e4m3_product, random().to(E4M3), random().to(E4M3).t(), one)
    return products


def _e4m3_product(
    left: torch.Tensor,  # [rows, inner] e4m3
    right: torch.Tensor,  # [inner, columns] e4m3, whose columns are contiguous
    one: torch.Tensor,  # 1 in float32, the scale of both
) -> torch.Tensor:
    """The product in fp16, with the accumulator that Hopper's matrix units have for e4m3."""
    kind = ScalingType.TensorWise
    return scaled_mm(left, right, one, kind, one, kind, output_dtype=torch.float16, use_fast_accum=True)


def _time(work: Callable[[], object], clocks: ClockMonitor) -> Timing:
    """The time of one call of `work`: a graph of ten calls, replayed until the mean is precise."""
    graph = capture(work, 10)
    settle(lambda: event_us(graph.replay) / 10)
    return sample_until_precise("graph of 10 calls", lambda: event_us(graph.replay) / 10, 10, clocks.is_slowed)
