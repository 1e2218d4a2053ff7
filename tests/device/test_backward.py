"""The backward kernels: each planted fault is found on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.target import native_arch
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.host.client import Workers
from pytest_fa.records.built import Build
from pytest_fa.wire.jobs import CaseJob
from tests.device.conftest import Built

KERNELS = Path(__file__).parents[2] / "kernels"
STARTS = ("wrong_backward_", "race_backward_", "race_bulk_", "race_overlap_", "race_registers_", "race_deterministic_")
FAULTS = sorted(name for name in discover((KERNELS,)).variants if name.startswith(STARTS))
# Many steps, and more blocks than SMs, so that buffers are used again; heads that share keys.
SHAPES = ("b2h16s1024d64-fp16-bwd", "b2h16s1024d64-fp16-causal-kv4-bwd", "b1h2s130d64-fp16-causal_br-sk300-bwd")


@pytest.fixture(scope="module")
def faults(shared_cache: Path) -> dict[str, Built]:
    """The builds with one fault each, built in one batch."""
    variants = discover((KERNELS,)).variants
    requests = [(variants[name], native_arch(variants[name])) for name in FAULTS]
    outcomes = ensure(requests, shared_cache).outcomes
    builds: dict[str, tuple[Variant, str]] = {}
    for variant, arch in requests:
        outcome = outcomes[(variant.name, arch)]
        assert isinstance(outcome, Build), outcome
        builds[variant.name] = (variant, str(shared_cache / outcome.library))
    return builds


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(workers: Workers, faults: dict[str, Built], fault: str) -> None:
    """A gradient is wrong, or not the same in each call, or the device fails, on at least one shape."""
    variant, library = faults[fault]
    cases = [parse_case(f"{shape}-seed0") for shape in SHAPES]
    jobs = [CaseJob(variant, case, library, "cuda", "same_precision", checks_output=True, time=False) for case in cases]
    assert any(workers.run(job).outcome in ("wrong", "device_error") for job in jobs), "no shape shows it"
