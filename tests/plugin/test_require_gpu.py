"""--fa-require-gpu: where a GPU must be, its absence is a failure."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import CASE, NewProject, Project, Run

REFUSED_CASE = "b1h2s64d64-bf16-seed0"


@pytest.fixture(scope="module")
def pair(new_project: NewProject) -> Project:
    """One variant that needs a GPU and one that does not."""
    project = new_project("require_gpu")
    project.cuda_variant("zero")
    project.python_variant("good")
    return project


@pytest.fixture(scope="module")
def run(pair: Project) -> Run:
    """Both variants, on a case that they take and on one that they do not."""
    return pair.suite(f"--fa-case={CASE},{REFUSED_CASE}", "-k", "test_correct", "--fa-no-build", "--fa-require-gpu")


def test_missing_gpu_fails(run: Run) -> None:
    """What needs a GPU fails where there is none; what does not is judged."""
    found = [run.outcomes[f"test_correct[{name}-{CASE}]"] for name in ("zero", "good")]
    assert found == ["failed", "passed"]


def test_failure_is_one_line(run: Run) -> None:
    """The failure is the reason with the option that made it one, and no chain of exceptions."""
    lines = run.failure(f"test_correct[zero-{CASE}]")
    assert lines == ["zero needs a GPU, and this machine has none (--fa-require-gpu)"]


def test_refused_cases_stay_skipped(run: Run) -> None:
    """A case that a variant does not take has nothing to do with the GPU: it stays a skip."""
    found = [run.outcomes[f"test_correct[{name}-{REFUSED_CASE}]"] for name in ("zero", "good")]
    assert found == ["skipped", "skipped"]
