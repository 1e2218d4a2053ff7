"""How far the matrix products and the softmax of a key tile overlap: the limits of kernels for long sequences.

`FA_SAVE_PIPES=profiles` also writes the times to `profiles/<gpu>/pipes.json`.
"""

from __future__ import annotations

import os
import statistics
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from pytest_fa.build.target import native_arch
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.module import build_library, load_forward
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import BuildError
from pytest_fa.gpu.graphs import event_us
from pytest_fa.records.environment import ClockMonitor, clock_monitor, read_environment
from pytest_fa.records.source import read_source
from tests.factories import WriteVariant
from tools.docs.pipes import Loop, Pipes, write_pipes

SOURCE = Path(__file__).with_name("pipes.cu")
MANIFEST = f"arch: [sm_90a]\nentry: {{include: [{Path(__file__).parents[2] / 'kernels' / 'include'}]}}\n"
LOOPS = (
    "products",
    "softmax",
    "both in each warpgroup",
    "both, in different warpgroups",
    "both in each warpgroup, row max of three integers",
    "both in each warpgroup, row sum by P V",
    "maxima of three integers",
    "maxima of two floats",
)
ITERATIONS, GROUPS, THREADS = 1000, 2, 256  # as in pipes.cu
TILE_FLOPS = 2 * 2 * 64 * 128 * 64  # Q K^T and P V for 64 queries and 128 keys at D = 64
MAXIMA = 32  # per thread and iteration
SAMPLES, CALLS = 15, 40  # each sample takes about 40 ms, so the clocks settle


@pytest.fixture
def loops(write_variant: WriteVariant, shared_cache: Path, tmp_path: Path) -> Forward:
    """The loops of pipes.cu as a function whose scale is the number of the loop; skips on other GPUs than sm_90."""
    folder = write_variant("pipes", manifest=MANIFEST, **{"kernel.cu": SOURCE.read_text(encoding="utf-8")})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    try:
        native_arch(variant)
    except BuildError as problem:
        pytest.skip(str(problem))
    return load_forward(variant, build_library(variant, shared_cache))


def test_products_and_softmax_overlap(loops: Forward) -> None:
    """Both together take less time than one after the other, and not less than the slower of the two."""
    with clock_monitor("cuda") as clocks:
        timed = {name: _time(loops, number, clocks) for number, name in enumerate(LOOPS)}
    pipes = _pipes(timed)
    if folder := os.environ.get("FA_SAVE_PIPES"):
        write_pipes(pipes, Path(folder))
    products, softmax, both, other = (timed[name].median_us for name in LOOPS[:4])
    assert 0.95 * max(products, softmax) < min(both, other)
    assert min(both, other) < products + softmax
    peak = pipes.environment.gpu == "NVIDIA H200" and 1100  # TFLOP/s; a loop without its work would be above it
    assert not peak or max(pipes.tflops.values()) < peak


def _time(loops: Forward, number: int, clocks: ClockMonitor) -> Loop:
    """Time launches of one loop, and read the clocks while launches are queued."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 512, 64, dtype=torch.float16, device="cuda")
    out = torch.empty_like(q)

    def call() -> object:
        return loops(q, k, v, scale=float(number), out=out)

    event_us(call, CALLS)
    samples = tuple(event_us(call, CALLS) / CALLS for _ in range(SAMPLES))
    for _ in range(CALLS):
        call()
    during = clocks.now()
    torch.cuda.synchronize()
    return Loop(samples, statistics.median(samples), during)


def _pipes(timed: dict[str, Loop]) -> Pipes:
    """The rates of all loops."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = blocks * GROUPS * ITERATIONS
    *both, three, two = LOOPS
    return Pipes(
        loops=timed,
        tflops={name: tiles * TILE_FLOPS / timed[name].median_us / 1e6 for name in both},
        per_clock={
            name: MAXIMA * THREADS * ITERATIONS / (loop.median_us * loop.clocks.sm_mhz)
            for name in (three, two)
            if (loop := timed[name]).clocks
        },
        environment=read_environment(),
        source=read_source(Path(__file__).parents[2]),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
