"""`--fa-static`: the machine code of every architecture is shown, limits are enforced, and no kernel runs."""

from __future__ import annotations

import pytest

from tests.factories import CUDA_SOURCE
from tests.projects import ZERO_MANIFEST, NewProject, Project, Run

pytestmark = pytest.mark.needs_nvcc


@pytest.fixture(scope="module")
def two(new_project: NewProject) -> Project:
    """A variant, one with `__launch_bounds__`, one that exceeds its limits, and one in Python."""
    project = new_project("static")
    project.cuda_variant("zero")
    project.cuda_variant("bounded", CUDA_SOURCE.replace("__global__ void", "__global__ void __launch_bounds__(BLOCK)"))
    project.cuda_variant("over", manifest=ZERO_MANIFEST + "limits: {registers_per_thread: 1}\n")
    project.python_variant("script")
    return project


@pytest.fixture(scope="module")
def run(two: Project) -> Run:
    """A run with --fa-static of two variants."""
    return two.suite("--fa-static", "--fa-variant=zero,bounded")


def test_only_builds_run(run: Run) -> None:
    """Only the builds of the selected variants are tested."""
    assert run.ret == 0, run.text
    assert {"test_build[zero]": "passed", "test_build[bounded]": "passed"} == run.outcomes


def test_every_architecture_has_its_row(run: Run) -> None:
    """Both tables have a row for each architecture of the manifest."""
    rows = [line.split()[:2] for line in run.outlines if line.split()[:1] in (["zero"], ["bounded"])]
    arches = ("sm_80", "sm_89", "sm_90a")
    assert [row for row in rows if "->" not in row] == 2 * [
        [name, arch] for name in ("zero", "bounded") for arch in arches
    ]


def test_a_bound_in_the_source_is_read(run: Run) -> None:
    """The threads are read from `__launch_bounds__(64)` in the cubin; without it they are unknown."""
    first = [line.split() for line in run.outlines if " sm_89 " in line][:2]
    assert {"zero": "-", "bounded": "64"} == {cells[0]: cells[7] for cells in first}


def test_the_difference_is_shown(run: Run) -> None:
    """If exactly two variants are selected, their difference is shown for each architecture."""
    start = run.outlines.index("zero -> bounded, instructions over all kernels:")
    assert [line.split(":")[0].strip() for line in run.outlines[start + 1 : start + 4]] == ["sm_80", "sm_89", "sm_90a"]


def test_limits_are_enforced(two: Project) -> None:
    """A variant with more registers than its manifest allows fails."""
    run = two.suite("--fa-static", "--fa-variant=over")
    assert (run.ret, run.outcomes) == (1, {"test_build[over]": "failed"})
    assert "registers_per_thread is " in run.text


def test_one_architecture_alone(two: Project) -> None:
    """`--fa-arch` restricts --fa-static to one architecture."""
    run = two.suite("--fa-static", "--fa-variant=zero", "--fa-arch=sm_80")
    assert {line.split()[1] for line in run.outlines if line.split()[:1] == ["zero"]} == {"sm_80"}
