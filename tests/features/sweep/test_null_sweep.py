"""`python -m tests.null_sweep`: configurations that differ in nothing but their machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.select import with_defines
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.features.sweep.suggest import Space
from pytest_fa.features.sweep.sweep_space import Sweep
from tests.honest_cases import KERNELS
from tests.null_sweep import CONFIGURATIONS, write_null_sweep


@pytest.fixture
def null_sweep(tmp_path: Path) -> Variant:
    """The variant, in a folder of its own."""
    (tmp_path / "include").symlink_to(KERNELS / "include")
    folder = write_null_sweep(tmp_path)
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path)
    return variant


def test_every_configuration_is_feasible(null_sweep: Variant) -> None:
    """There are 200, none of which is the variant itself."""
    sweep = Sweep.of(null_sweep)
    assert sweep is not None
    points = Space(sweep, null_sweep.defines).points
    assert len(points) == CONFIGURATIONS == 200
    assert null_sweep.defines not in points


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_machine_code_differs(null_sweep: Variant, tmp_path: Path) -> None:
    """A configuration has as many instructions and registers as the variant, but other code."""
    arch: Target = "sm_90a"
    pair = [null_sweep, with_defines(null_sweep, {"NEVER_STORED": 1})]
    outcomes = ensure([(each, arch) for each in pair], tmp_path / "cache").outcomes
    built = [outcomes[each.name, arch] for each in pair]
    first, second = (each for each in built if not isinstance(each, BuildFailure))
    assert first.code_identity != second.code_identity
    assert [kernel.registers_per_thread for kernel in first.kernels] == [
        kernel.registers_per_thread for kernel in second.kernels
    ]
    assert [kernel.instructions for kernel in first.kernels] == [kernel.instructions for kernel in second.kernels]
