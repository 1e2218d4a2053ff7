"""The backward kernels: each planted fault is found on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.catalog.discover import discover
from pytest_fa.host.client import Workers
from tests.device.conftest import Built, build_together, is_found_out

KERNELS = Path(__file__).parents[2] / "kernels"
FAULTS = sorted(
    name
    for name, variant in discover((KERNELS,)).variants.items()
    if variant.role == "wrong" and variant.computes == "gradients" and variant.entry.kind == "cuda"
)
# Many steps, and more blocks than SMs, so that buffers are used again; heads that share keys.
SHAPES = ("b2h16s1024d64-fp16-bwd", "b2h16s1024d64-fp16-causal-kv4-bwd", "b1h2s130d64-fp16-causal_br-sk300-bwd")


@pytest.fixture(scope="module")
def faults(shared_cache: Path) -> dict[str, Built]:
    """The builds with one fault each, built in one batch."""
    return build_together(FAULTS, shared_cache)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(workers: Workers, faults: dict[str, Built], fault: str) -> None:
    """A gradient is wrong, or not the same in each call, or the device fails, on at least one shape."""
    assert is_found_out(workers, faults[fault], SHAPES, repeats=None), "no shape shows it"
