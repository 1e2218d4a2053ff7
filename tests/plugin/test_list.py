"""--fa-list."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_MANIFEST
from tests.plugin.conftest import COMPANIONS, NewProject, Project, Run


@pytest.fixture(scope="module")
def house(new_project: NewProject) -> Project:
    """Two variants of our own and a broken manifest."""
    project = new_project("list")
    project.cuda_variant("zero")
    project.python_variant("good", manifest=PYTHON_MANIFEST.replace("a test's variant", "K in smem [swizzled], V not"))
    project.write("kernels/broken/variant.yaml", "step: [\n")
    return project


@pytest.fixture(scope="module")
def listed(house: Project) -> Run:
    """The list."""
    return house.run("--fa-list")


def row(result: Run, variant: str) -> str:
    """The line of one variant, its columns one space apart."""
    (line,) = [" ".join(each.split()) for each in result.outlines if each.split()[:1] == [variant]]
    return line


def test_every_variant_has_a_line(listed: Run) -> None:
    """Own variants come first, companions after them; the exit status is 0."""
    names = [line.split()[0] for line in listed.said]
    assert (listed.ret, [name for name in names if name in ("good", "zero", *COMPANIONS)]) == (
        pytest.ExitCode.OK,
        ["good", "zero", *COMPANIONS],
    )


def test_line_says_what_a_variant_takes(listed: Run) -> None:
    """A line has role, kind of entry, architectures, dtypes, head dimensions and the step."""
    assert row(listed, "zero") == "zero candidate cuda sm_80, sm_89, sm_90a fp16 64 a test's variant"


def test_step_is_shown_as_it_is_written(listed: Run) -> None:
    """Square brackets in a manifest's text are text."""
    assert row(listed, "good").endswith("64 K in smem [swizzled], V not")


def test_broken_manifests_come_last(listed: Run) -> None:
    """A manifest that cannot be read is listed with its problem."""
    index = next(index for index, line in enumerate(listed.said) if line.startswith("broken: "))
    rest = " ".join(" ".join(listed.said[index:]).split())  # long paths are folded
    assert "expected the node content, but found '<stream end>'" in rest
    assert [name for name in COMPANIONS if name in rest] == []


def test_nothing_runs(house: Project, listed: Run) -> None:
    """The list is all: no test, no record, no header."""
    assert listed.ret == pytest.ExitCode.OK
    assert ([line for line in listed.said if "test session" in line], house.logs) == ([], [])


def test_wrong_name_beside_it_is_a_usage_error(house: Project) -> None:
    """A name that does not exist is told even where only the list was asked for."""
    result = house.run("--fa-list", "--fa-variant=zro")
    complaint = "ERROR: --fa-variant: no variant 'zro'; did you mean 'zero'? (see --fa-list)"
    assert (result.ret, result.said) == (pytest.ExitCode.USAGE_ERROR, [complaint])
