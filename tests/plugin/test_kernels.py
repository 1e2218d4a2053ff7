"""--fa-kernels: where variants are looked for."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import ONE_CASE, NewProject, Project, variants_of


@pytest.fixture(scope="module")
def roots(new_project: NewProject) -> Project:
    """The default folder and two others."""
    project = new_project("roots")
    project.python_variant("usual")
    project.python_variant("alpha", root="first")
    project.python_variant("beta", root="second/kernels")
    return project


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], ["usual"]),
        (["--fa-kernels=first"], ["alpha"]),
        (["--fa-kernels=second/kernels,first"], ["beta", "alpha"]),
        (["--fa-kernels=kernels,first,kernels"], ["usual", "alpha"]),
    ],
    ids=["default", "another", "two in their order", "one given twice"],
)
def test_folders(roots: Project, arguments: list[str], found: list[str]) -> None:
    """Each folder is searched once, in the order given; without the option it is `kernels`."""
    assert variants_of(roots.ids(ONE_CASE, *arguments), "test_correct") == found


def test_absolute_folder(roots: Project, project: Project) -> None:
    """A folder may lie outside of the project."""
    ids = project.ids(ONE_CASE, f"--fa-kernels={roots.folder / 'first'}")
    assert variants_of(ids, "test_correct") == ["alpha"]


def test_missing_folder_is_a_usage_error(roots: Project) -> None:
    """A folder that was named and is not there is exit status 4 and one line."""
    result = roots.collect("--fa-kernels=frist")
    complaint = f"ERROR: --fa-kernels: no folder '{roots.folder / 'frist'}'; it must hold <variant>/variant.yaml"
    assert (result.ret, result.said) == (pytest.ExitCode.USAGE_ERROR, [complaint])


def test_default_folder_may_be_missing(project: Project) -> None:
    """Without a kernels folder the variants that come with us can still be named."""
    ids = project.ids(ONE_CASE, "--fa-variant=sdpa_math")
    assert variants_of(ids, "test_correct") == ["sdpa_math"]
