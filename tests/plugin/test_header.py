"""The line of ours in pytest's header."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import NewProject, Project


@pytest.fixture(scope="module")
def trio(new_project: NewProject) -> Project:
    """Three variants, beside the five that come with us."""
    project = new_project("header")
    for name in ("alpha", "beta", "gamma"):
        project.python_variant(name)
    return project


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (["--fa-suite=smoke"], "fa: no GPU; 3 of 8 variants; 3 cases"),
        (["--fa-variant=alpha,beta"], "fa: no GPU; 2 of 8 variants; 12 cases"),
    ],
)
def test_header_counts(trio: Project, arguments: list[str], title: str) -> None:
    """With an option of ours the header says which GPU there is, how many variants of all, and how many cases."""
    lines = [line for line in trio.suite("--collect-only", *arguments).said if line.startswith("fa: ")]
    assert lines == [title]


def test_no_header_without_an_option(trio: Project) -> None:
    """Without an option of ours there is no line."""
    assert [line for line in trio.suite("--collect-only").said if line.startswith("fa: ")] == []
