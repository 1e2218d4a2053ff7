"""A run in which all selected tests are skipped fails, and says so."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.factories import PYTHON_MANIFEST
from tests.projects import NewProject, Project, Run

CORRECT = ("-k", "test_correct", "--fa-no-build")


@pytest.fixture(scope="module")
def zero(new_project: NewProject) -> Project:
    """A project whose only variant needs a GPU."""
    project = new_project("nothing_ran")
    project.cuda_variant("zero")
    return project


@pytest.fixture(scope="module")
def run(zero: Project) -> Run:
    """A run of two cases of the variant that needs a GPU."""
    return zero.suite("--fa-case=b1h2s64d64-fp16-seed0,b1h2s64d64-fp16-seed1", "--fa-variant=zero", *CORRECT)


def test_the_run_fails(run: Run) -> None:
    """The exit status is 1, although no test failed."""
    assert (run.ret, list(run.outcomes.values())) == (pytest.ExitCode.TESTS_FAILED, ["skipped", "skipped"])


def test_the_reasons_are_counted(run: Run, snapshot: SnapshotAssertion) -> None:
    """The end of the run shows the number of skipped tests, and each reason with its count."""
    lines = run.all_lines
    start = lines.index("fa: nothing ran: 2 selected tests were skipped")
    assert snapshot == lines[start + 1]


def test_refused_cases_are_nothing_too(zero: Project) -> None:
    """A run in which the variants support none of the cases fails, too."""
    result = zero.suite("--fa-suite=smoke", "--fa-dtype=bf16", "--fa-variant=zero", *CORRECT)
    refused = ["bf16, supports fp16" in reason for reason in result.reasons.values()]
    assert (result.ret, refused) == (pytest.ExitCode.TESTS_FAILED, [True, True])


def test_collecting_passes(zero: Project) -> None:
    """With --collect-only the exit status is 0."""
    assert zero.collect("--fa-variant=zero").ret == pytest.ExitCode.OK


def test_a_case_that_the_named_variant_does_not_support(project: Project) -> None:
    """The last line names the variant and why it was not judged; no baseline is timed in its place."""
    project.python_variant("plain", manifest=PYTHON_MANIFEST.replace("[none, top_left]", "[none]"))
    run = project.suite("--fa-variant=plain", "--fa-case=b1h2s64d64-fp16-causal")
    reason = "plain does not support b1h2s64d64-fp16-causal: causal is top_left, supports none"
    assert (run.ret, run.all_lines[-1].startswith(f"not judged: {reason}")) == (pytest.ExitCode.TESTS_FAILED, True)
    assert (project.records, "right" in run.text) == ([], False)
