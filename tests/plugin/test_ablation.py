"""A stage's time by leaving the stage out: timed, not judged, shown beside the whole."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.plugin.conftest import ONE_CASE, SHAPE, NewProject, Project, Run

PART_SOURCE = PYTHON_SOURCE.replace("torch.softmax(scores, -1)", "scores")
PART_MANIFEST = PYTHON_MANIFEST + "role: ablation\nparent: whole\nomits: softmax\n"


@pytest.fixture(scope="module")
def both(new_project: NewProject) -> Project:
    """A right variant, and the same without its softmax."""
    project = new_project("ablation")
    project.python_variant("whole")
    project.python_variant("no_softmax", PART_SOURCE, PART_MANIFEST)
    return project


@pytest.fixture(scope="module")
def run(both: Project) -> Run:
    """Both of them."""
    return both.suite("--fa-variant=whole,no_softmax", ONE_CASE, "-k", "whole or no_softmax")


def test_what_computes_no_attention_is_not_judged(run: Run) -> None:
    """It is timed, and no test asks whether it is right."""
    assert run.ret == 0, run.text
    mine = {name: outcome for name, outcome in run.outcomes.items() if "no_softmax" in name}
    assert {f"test_speed[no_softmax-{SHAPE}]": "passed"} == mine


def test_the_difference_is_shown_as_measured(run: Run, both: Project) -> None:
    """Two measured times and their difference, in the words that say how it was got."""
    (line,) = [each for each in run.outlines if "measured by leaving it out" in each]
    assert line.startswith(f"{SHAPE}: whole ")
    assert "us, without softmax " in line
    assert [each.ablation.phase for each in both.records if each.ablation] == ["softmax"]


def test_a_part_alone_shows_no_difference(both: Project) -> None:
    """Without the whole in the run there is nothing to subtract from."""
    run = both.suite("--fa-variant=no_softmax", ONE_CASE, "-k", "no_softmax")
    assert (run.ret, "leaving it out" in run.text) == (0, False), run.text
