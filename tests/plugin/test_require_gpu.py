"""--fa-require-gpu: tests that need a GPU fail if there is none."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.projects import CASE, NewProject, Project, Run

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
    """A run of both variants on a case that they support and on one that they refuse."""
    return pair.suite(f"--fa-case={CASE},{REFUSED_CASE}", "-k", "test_correct", "--fa-no-build", "--fa-require-gpu")


def test_missing_gpu_fails(run: Run) -> None:
    """A variant that needs a GPU fails without one; a variant for the CPU is judged."""
    outcomes = [run.outcomes[f"test_correct[{name}-{CASE}]"] for name in ("zero", "good")]
    assert outcomes == ["failed", "passed"]


def test_failure_is_one_line(run: Run, snapshot: SnapshotAssertion) -> None:
    """The failure is one line with the reason and the option, without a chain of exceptions."""
    lines = run.failure(f"test_correct[zero-{CASE}]")
    assert snapshot == lines


def test_refused_cases_stay_skipped(run: Run) -> None:
    """A case that a variant does not support is still skipped, because that does not depend on the GPU."""
    outcomes = [run.outcomes[f"test_correct[{name}-{REFUSED_CASE}]"] for name in ("zero", "good")]
    assert outcomes == ["skipped", "skipped"]


def test_the_answer_says_that_tests_failed(run: Run) -> None:
    """A failure without a record is part of the answer, which proposes nothing."""
    assert run.outlines[-1].startswith("good: 1/1 checks passed; not timed; 1 test failed without a result")
