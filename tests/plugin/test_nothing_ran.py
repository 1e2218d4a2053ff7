"""A run whose selected cases all stayed undone is red, and says so."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import NewProject, Project, Run

CORRECT = ("-k", "test_correct", "--fa-no-build")


@pytest.fixture(scope="module")
def zero(new_project: NewProject) -> Project:
    """One variant, and it needs a GPU."""
    project = new_project("nothing_ran")
    project.cuda_variant("zero")
    return project


@pytest.fixture(scope="module")
def run(zero: Project) -> Run:
    """Two cases of the variant that needs a GPU."""
    return zero.suite("--fa-case=b1h2s64d64-fp16-seed0,b1h2s64d64-fp16-seed1", "--fa-variant=zero", *CORRECT)


def test_it_is_red(run: Run) -> None:
    """The exit status is 1, although no test failed."""
    assert (run.ret, list(run.outcomes.values())) == (pytest.ExitCode.TESTS_FAILED, ["skipped", "skipped"])


def test_it_says_so(run: Run) -> None:
    """The end of the run counts the cases, and each reason with its cases."""
    lines = run.said
    start = lines.index("fa: nothing ran: all that was selected was skipped (2)")
    assert lines[start + 1] == "  2 x zero needs a GPU, and this machine has none"


def test_refused_cases_are_nothing_too(zero: Project) -> None:
    """It is red as well where every case was outside of what the variants take."""
    result = zero.suite("--fa-suite=smoke", "--fa-dtype=bf16", "--fa-variant=zero", *CORRECT)
    refused = ["bf16, supports fp16" in reason for reason in result.reasons.values()]
    assert (result.ret, refused) == (pytest.ExitCode.TESTS_FAILED, [True, True])


def test_dry_run_is_green(zero: Project) -> None:
    """--collect-only asks for no run, and gets exit status 0."""
    assert zero.collect("--fa-variant=zero").ret == pytest.ExitCode.OK
