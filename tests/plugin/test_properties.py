"""`test_property`: which refusals are allowed, and what the rerun command runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.factories import PYTHON_SOURCE
from tests.plugin.conftest import Project, Run

REFUSES = PYTHON_SOURCE.replace(
    "    scores =",
    "    from pytest_fa.errors import UnsupportedCase\n\n    raise UnsupportedCase('not today')\n    scores =",
    1,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Run]:
    """A run of some properties on a correct kernel and on one that refuses every call."""
    project = Project(tmp_path_factory.mktemp("properties"), tmp_path_factory.mktemp("cache"))
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
    assert "refuses-hard_data: refused a case that its manifest supports: not today" in result.text
    assert "refuses: padded_rows: not today" in result.reasons["test_property[refuses-padded_rows]"]


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
