"""Ablations: a variant without one phase is timed, not judged, and compared with its parent."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import ONE_CASE, SHAPE, NewProject, Project, Run

ABLATION_SOURCE = PYTHON_SOURCE.replace("torch.softmax(scores, -1)", "scores")
ABLATION_MANIFEST = PYTHON_MANIFEST + "role: ablation\nparent: whole\nomits: softmax\n"


@pytest.fixture(scope="module")
def both(new_project: NewProject) -> Project:
    """A correct variant and its ablation without softmax."""
    project = new_project("ablation")
    project.python_variant("whole")
    project.python_variant("no_softmax", ABLATION_SOURCE, ABLATION_MANIFEST)
    return project


@pytest.fixture(scope="module")
def run(both: Project) -> Run:
    """A run of both variants."""
    return both.suite("--fa-variant=whole,no_softmax", ONE_CASE, "-k", "whole or no_softmax")


def test_an_ablation_is_timed_and_not_judged(run: Run) -> None:
    """The only test of an ablation is its timing."""
    assert run.ret == 0, run.text
    ablation_outcomes = {name: outcome for name, outcome in run.outcomes.items() if "no_softmax" in name}
    assert {f"test_speed[no_softmax-{SHAPE}]": "passed"} == ablation_outcomes


def test_the_difference_is_shown_as_measured(run: Run, both: Project) -> None:
    """The terminal shows both measured times and their difference, and says that it was measured by ablation."""
    (line,) = [each for each in run.outlines if "measured by ablation" in each]
    assert line.startswith(f"{SHAPE}: whole ")
    assert "us, without softmax " in line
    assert [each.ablation.phase for each in both.records if each.ablation] == ["softmax"]


@pytest.mark.nightly
def test_an_ablation_alone_shows_no_difference(both: Project) -> None:
    """If the parent is not in the run, no difference is shown."""
    run = both.suite("--fa-variant=no_softmax", ONE_CASE, "-k", "no_softmax")
    assert (run.ret, "measured by ablation" in run.text) == (0, False), run.text
