"""Torch's own attention is adopted by a manifest alone, as a baseline; as a candidate it is told to be none."""

from __future__ import annotations

import pytest

from tests.adopted import SDPA
from tests.projects import CASE, SHAPE, NewProject, Project, Run

CASES = f"--fa-case={CASE},{SHAPE}-maskbhq-seed0,{SHAPE}-causal-kv1-seed0,{SHAPE}-bias-seed0"
VARIANTS = ("theirs", "theirs_masked", "theirs_biased")


@pytest.fixture(scope="module")
def adopted(new_project: NewProject) -> Project:
    """SDPA as three baselines, and the same as a candidate."""
    project = new_project("adopted")
    project.write("kernels/theirs/variant.yaml", SDPA)
    candidate = SDPA.replace("role: baseline\noptional: true\n", "").partition("variants:")[0]
    project.write("kernels/ours/variant.yaml", candidate)
    return project


@pytest.fixture(scope="module")
def run(adopted: Project) -> Run:
    """One run of all four."""
    return adopted.suite(CASES, f"--fa-variant=ours,{','.join(VARIANTS)}", "-k", "test_correct")


def test_a_baseline_is_right(run: Run) -> None:
    """Each variant passes the cases that it claims, and the others are skipped."""
    passed = {name for name, outcome in run.outcomes.items() if outcome == "passed"}
    assert passed == {
        f"test_correct[theirs-{CASE}]",
        f"test_correct[theirs-{SHAPE}-causal-kv1-seed0]",
        f"test_correct[theirs_masked-{CASE}]",
        f"test_correct[theirs_masked-{SHAPE}-maskbhq-seed0]",
        f"test_correct[theirs_biased-{CASE}]",
        f"test_correct[theirs_biased-{SHAPE}-bias-seed0]",
    }


def test_a_candidate_delegates(run: Run) -> None:
    """The same function fails as a candidate, with the operator that it calls."""
    reason = run.reasons[f"test_correct[ours-{CASE}]"]
    assert "calls torch's own attention operator aten::" in reason.splitlines()[0]
