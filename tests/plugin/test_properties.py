"""`test_property`: which refusals are allowed, and what the rerun command runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import Project, Run

REFUSES = PYTHON_SOURCE.replace(
    "    scores =",
    "    from pytest_fa.errors import UnsupportedCase\n\n    raise UnsupportedCase('not today')\n    scores =",
    1,
)

# Takes a scale of 0 for a missing scale.
DEFAULT_SCALE = PYTHON_SOURCE.replace("    scores =", "    scale = scale or q.shape[3] ** -0.5\n    scores =", 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, resident_server: str) -> tuple[Project, Run]:
    """A run of some properties on a correct kernel and on one that refuses every call."""
    project = Project(tmp_path_factory.mktemp("properties"), tmp_path_factory.mktemp("cache"), resident_server)
    project.ini()
    project.python_variant("good")
    project.python_variant("refuses", REFUSES)
    return project, project.suite("-k", "test_property and (hard_data or padded_rows or streams)")


def test_a_refusal_where_none_is_allowed_fails(run: tuple[Project, Run]) -> None:
    """A kernel may refuse strides but not data; a property that needs a GPU is skipped without one."""
    _, result = run
    assert result.outcomes == {
        "test_property[good-hard_data]": "passed",
        "test_property[good-padded_rows]": "passed",
        "test_property[good-streams]": "skipped",
        "test_property[refuses-hard_data]": "failed",
        "test_property[refuses-padded_rows]": "skipped",
        "test_property[refuses-streams]": "skipped",
    }
    assert "refused: not today" in result.text
    assert "refuses: padded_rows: not today" in result.reasons["test_property[refuses-padded_rows]"]


def test_a_baseline_may_lack_a_property_and_a_candidate_may_not(project: Project) -> None:
    """The same error fails the test of a candidate; the test of a baseline is skipped with the error as the reason."""
    project.python_variant("own", DEFAULT_SCALE)
    project.python_variant("theirs", DEFAULT_SCALE, PYTHON_MANIFEST + "role: baseline\n")
    result = project.suite("--fa-variant=own,theirs", "-k", "test_property and zero_scale")
    own, theirs = "test_property[own-zero_scale]", "test_property[theirs-zero_scale]"
    assert {own: "failed", theirs: "skipped"} == result.outcomes
    reason = result.reasons[theirs]
    assert (True, True) == (
        reason.startswith("theirs: zero_scale: "),
        reason.endswith(" (a baseline may lack a property)"),
    )


def test_every_built_in_baseline_passes_or_skips_its_properties(project: Project) -> None:
    """No SDPA backend fails a property: torch's flash kernel for the CPU is not exact with scale 0 on every machine."""
    result = project.suite("--fa-variant=sdpa_*", "-k", "test_property and scale")
    assert {"passed", "skipped"} == set(result.outcomes.values())


def test_the_rerun_command_runs_that_property(run: tuple[Project, Run]) -> None:
    """The rerun command of a failed property runs only that property, which fails again."""
    project, result = run
    (line,) = [each for each in result.failure("test_property[refuses-hard_data]") if each.startswith("  rerun: ")]
    again = project.run(*shlex.split(line.removeprefix("  rerun: "))[1:])
    assert again.outcomes == {"test_property[refuses-hard_data]": "failed"}


def test_named_cases_exclude_properties(tmp_path: Path) -> None:
    """With `--fa-case` no properties are tested."""
    project = Project(tmp_path, tmp_path / "cache")
    project.ini()
    project.python_variant("good")
    assert not [test_id for test_id in project.ids("--fa-case=b1h2s64d64-fp16-seed0") if "test_property" in test_id]
    assert [test_id for test_id in project.ids() if "test_property" in test_id]
