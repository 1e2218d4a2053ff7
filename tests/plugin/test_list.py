"""--fa-list: the list of variants."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.discover import discover
from tests.factories import PYTHON_MANIFEST
from tests.projects import COMPANIONS, NewProject, Project, Run


@pytest.fixture(scope="module")
def project_with_broken(new_project: NewProject) -> Project:
    """Two variants and a broken manifest."""
    project = new_project("list")
    project.cuda_variant("zero")
    project.python_variant("good", manifest=PYTHON_MANIFEST.replace("a test's variant", "K in smem [swizzled], V not"))
    project.write("kernels/broken/variant.yaml", "step: [\n")
    return project


@pytest.fixture(scope="module")
def listed(project_with_broken: Project) -> Run:
    """A run with --fa-list in a wide terminal."""
    return project_with_broken.run_here("--fa-list", env={"COLUMNS": "160"})


def row(result: Run, variant: str) -> str:
    """The line of one variant, with single spaces between its columns."""
    (line,) = [" ".join(each.split()) for each in result.outlines if each.split()[:1] == [variant]]
    return line


def test_every_variant_has_a_line(listed: Run) -> None:
    """The project's own variants are listed first, then the companions; the exit status is 0."""
    names = [line.split()[0] for line in listed.all_lines]
    assert (listed.ret, [name for name in names if name in ("good", "zero", *COMPANIONS)]) == (
        pytest.ExitCode.OK,
        ["good", "zero", *COMPANIONS],
    )


def test_line_shows_what_a_variant_supports(listed: Run, snapshot: SnapshotAssertion) -> None:
    """A line has the role, the kind of entry, dtypes, head dimensions and the step."""
    assert snapshot == row(listed, "zero")


def test_step_is_shown_as_it_is_written(listed: Run) -> None:
    """Square brackets in a manifest's text are printed and not interpreted as markup."""
    assert row(listed, "good").endswith("64 K in smem [swizzled], V not")


@pytest.mark.parametrize("columns", [80, 100])
def test_the_list_is_as_wide_as_the_terminal(project_with_broken: Project, columns: int) -> None:
    """With COLUMNS, no line of the table is longer, each variant has one line, and its name is whole."""
    result = project_with_broken.run_here("--fa-list", env={"COLUMNS": str(columns)})
    words = [line.split()[0] for line in result.all_lines]
    shipped = list(discover(()).variants)
    assert len(result.all_lines) == 1 + len(["good", "zero", *shipped]) + 2  # the head, the hint, the broken one
    assert [] == [line for line in result.outlines if len(line) > columns and not line.startswith("broken: ")]
    assert ["good", "zero", *shipped] == [name for name in words if name in ("good", "zero", *shipped)]


def test_a_name_or_glob_shows_variants_whole(project_with_broken: Project, snapshot: SnapshotAssertion) -> None:
    """--fa-list=NAME,GLOB shows what the manifests of these variants say, within the width of the terminal."""
    result = project_with_broken.run_here("--fa-list=zero,g*d", env={"COLUMNS": "80"})
    lines = [line.replace(str(project_with_broken.folder), "PROJECT") for line in result.outlines]
    assert (result.ret, lines) == snapshot


def test_a_wrong_name_names_the_list(project_with_broken: Project) -> None:
    """A name that no variant has ends the run with the option that was typed."""
    result = project_with_broken.run_here("--fa-list=zro")
    complaint = "ERROR: --fa-list: no variant 'zro'; did you mean 'zero'? (see --fa-list)"
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [complaint])


def test_broken_manifests_come_last(listed: Run) -> None:
    """A manifest that cannot be read is listed after the variants, with its problem."""
    index = next(index for index, line in enumerate(listed.all_lines) if line.startswith("broken: "))
    rest = " ".join(" ".join(listed.all_lines[index:]).split())  # long paths are folded
    assert (
        "line 2, column 1: while parsing a flow node, expected the node content, but found the end of the file" in rest
    )
    assert [name for name in COMPANIONS if name in rest] == []


def test_nothing_runs(project_with_broken: Project, listed: Run) -> None:
    """--fa-list runs no tests and writes no records and no header."""
    assert listed.ret == pytest.ExitCode.OK
    assert ([line for line in listed.all_lines if "test session" in line], project_with_broken.logs) == ([], [])


def test_wrong_name_with_the_list_is_a_usage_error(project_with_broken: Project) -> None:
    """A wrong name is a usage error also with --fa-list."""
    result = project_with_broken.run_here("--fa-list", "--fa-variant=zro")
    complaint = "ERROR: --fa-variant: no variant 'zro'; did you mean 'zero'? (see --fa-list)"
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [complaint])
