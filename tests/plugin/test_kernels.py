"""--fa-kernels: the folders that are searched for variants."""

from __future__ import annotations

import pytest

from tests.projects import ONE_CASE, NewProject, Project, variants_of


@pytest.fixture(scope="module")
def roots(new_project: NewProject) -> Project:
    """A project with variants in the default folder and in two others."""
    project = new_project("roots")
    project.python_variant("usual")
    project.python_variant("alpha", root="first")
    project.python_variant("beta", root="second/kernels")
    return project


@pytest.mark.parametrize(
    ("arguments", "variants"),
    [
        ([], ["usual"]),
        (["--fa-kernels=first"], ["alpha"]),
        (["--fa-kernels=second/kernels,first"], ["beta", "alpha"]),
        (["--fa-kernels=kernels,first,kernels"], ["usual", "alpha"]),
    ],
    ids=["default", "another", "two in their order", "one given twice"],
)
def test_folders(roots: Project, arguments: list[str], variants: list[str]) -> None:
    """Each folder is searched once, in the order of the option; the default folder is `kernels`."""
    assert variants_of(roots.ids(ONE_CASE, *arguments), "test_correct") == variants


def test_absolute_folder(roots: Project, project: Project) -> None:
    """A folder may be outside of the project."""
    ids = project.ids(ONE_CASE, f"--fa-kernels={roots.folder / 'first'}")
    assert variants_of(ids, "test_correct") == ["alpha"]


def test_missing_folder_is_a_usage_error(roots: Project) -> None:
    """A folder of the option that does not exist is a usage error of one line."""
    result = roots.collect("--fa-kernels=frist")
    folder = roots.folder / "frist"
    command = f"`python -m pytest_fa new NAME --kernels={folder}` writes a variant into {folder}"
    complaint = f"ERROR: --fa-kernels: no folder '{folder}'; did you mean 'first'?; {command}"
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [complaint])


def test_default_folder_may_be_missing(project: Project) -> None:
    """Without a `kernels` folder, the variants that are shipped with the package can still be selected."""
    ids = project.ids(ONE_CASE, "--fa-variant=sdpa_math")
    assert variants_of(ids, "test_correct") == ["sdpa_math"]
