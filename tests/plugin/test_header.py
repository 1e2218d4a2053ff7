"""The plugin's line in pytest's header."""

from __future__ import annotations

import pytest

from tests.projects import NewProject, Project


@pytest.fixture(scope="module")
def trio(new_project: NewProject) -> Project:
    """Three variants, in addition to the five that are shipped with the package."""
    project = new_project("header")
    for name in ("alpha", "beta", "gamma"):
        project.python_variant(name)
    return project


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (["--fa-suite=smoke"], "fa: no GPU; 3 of 24 variants"),
        (["--fa-variant=alpha,beta"], "fa: no GPU; 2 of 24 variants"),
    ],
)
def test_header_counts(trio: Project, arguments: list[str], title: str) -> None:
    """With an --fa option, the header shows the GPU and the numbers of selected and of all variants."""
    lines = [line for line in trio.suite("--collect-only", *arguments).all_lines if line.startswith("fa: ")]
    assert lines == [title]


def test_no_header_without_an_option(trio: Project) -> None:
    """Without an --fa option, the plugin adds no line to the header."""
    assert [line for line in trio.suite("--collect-only").all_lines if line.startswith("fa: ")] == []
