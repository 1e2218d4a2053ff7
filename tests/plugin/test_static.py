"""`--fa-static`: every architecture's machine code, limits enforced, nothing run."""

from __future__ import annotations

import pytest

from tests.factories import CUDA_SOURCE
from tests.plugin.conftest import ZERO_MANIFEST, NewProject, Project, Run

pytestmark = pytest.mark.needs_nvcc


@pytest.fixture(scope="module")
def two(new_project: NewProject) -> Project:
    """A variant and another with a larger block, one that is over its limits, and one in Python."""
    project = new_project("static")
    project.cuda_variant("zero")
    project.cuda_variant("bounded", CUDA_SOURCE.replace("__global__ void", "__global__ void __launch_bounds__(BLOCK)"))
    project.cuda_variant("over", manifest=ZERO_MANIFEST + "limits: {registers_per_thread: 1}\n")
    project.python_variant("script")
    return project


@pytest.fixture(scope="module")
def run(two: Project) -> Run:
    """Two variants."""
    return two.suite("--fa-static", "--fa-variant=zero,bounded")


def test_only_builds_run(run: Run) -> None:
    """One item for each variant, whatever else was offered."""
    assert run.ret == 0, run.text
    assert {"test_build[zero]": "passed", "test_build[bounded]": "passed"} == run.outcomes


def test_every_architecture_has_its_row(run: Run) -> None:
    """Facts and instructions, for each architecture of the manifest."""
    rows = [line.split()[:2] for line in run.outlines if line.split()[:1] in (["zero"], ["bounded"])]
    arches = ("sm_80", "sm_89", "sm_90a")
    assert [row for row in rows if "->" not in row] == 2 * [
        [name, arch] for name in ("zero", "bounded") for arch in arches
    ]


def test_a_bound_in_the_source_is_read(run: Run) -> None:
    """`__launch_bounds__(64)` stands in the cubin; without it the threads are unknown."""
    first = [line.split() for line in run.outlines if " sm_89 " in line][:2]
    assert {"zero": "-", "bounded": "64"} == {cells[0]: cells[7] for cells in first}


def test_the_difference_is_shown(run: Run) -> None:
    """Two variants were asked for: what is different, or that nothing is."""
    start = run.outlines.index("zero -> bounded, instructions over all kernels:")
    assert [line.split(":")[0].strip() for line in run.outlines[start + 1 : start + 4]] == ["sm_80", "sm_89", "sm_90a"]


def test_limits_are_enforced(two: Project) -> None:
    """More registers than the manifest allows fail the test."""
    run = two.suite("--fa-static", "--fa-variant=over")
    assert (run.ret, run.outcomes) == (1, {"test_build[over]": "failed"})
    assert "registers_per_thread is " in run.text


def test_one_architecture_alone(two: Project) -> None:
    """`--fa-arch` still chooses."""
    run = two.suite("--fa-static", "--fa-variant=zero", "--fa-arch=sm_80")
    assert {line.split()[1] for line in run.outlines if line.split()[:1] == ["zero"]} == {"sm_80"}
