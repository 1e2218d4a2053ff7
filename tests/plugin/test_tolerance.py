"""--fa-tolerance: judge by another policy than the manifests'."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import ONE_CASE, NewProject, Project


@pytest.fixture(scope="module")
def good(new_project: NewProject) -> Project:
    """A variant whose manifest says nothing of tolerances."""
    project = new_project("tolerance")
    project.python_variant("good")
    return project


def test_policy_is_used(good: Project) -> None:
    """The named policy judges, whatever the manifest says, and the record names it."""
    good.suite(ONE_CASE, "-k", "test_correct", "--fa-tolerance=absolute")
    assert [record.check.policy if record.check else None for record in good.records] == ["absolute"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--fa-tolerance=mesured"],
            "--fa-tolerance: no 'mesured'; did you mean 'measured'? (allowed: measured, absolute)",
        ),
        (
            ["--fa-tolerance=absolute", "--fa-suite=smoke"],
            "--fa-tolerance=absolute judges fp16 only; case b1h2s64d64-bf16-seed0 is bf16 (use measured)",
        ),
    ],
    ids=["unknown", "not for these cases"],
)
def test_bad_policy_is_a_usage_error(good: Project, arguments: list[str], complaint: str) -> None:
    """A policy that does not exist or cannot judge these cases is exit status 4 and one line."""
    result = good.collect(*arguments)
    assert (result.ret, result.said) == (pytest.ExitCode.USAGE_ERROR, [f"ERROR: {complaint}"])


def test_two_policies_are_a_usage_error(good: Project) -> None:
    """Two policies at once are refused in one line: one of them would be dropped in silence."""
    result = good.collect("--fa-tolerance=measured,absolute")
    assert (result.ret, len(result.said)) == (pytest.ExitCode.USAGE_ERROR, 1)
