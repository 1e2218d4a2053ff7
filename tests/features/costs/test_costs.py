"""A run writes where its seconds went, and `python -m pytest_fa costs` makes a table of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_fa.records.costs import RunSeconds, read_run_seconds
from tests.projects import ONE_CASE, Project, inner_environment


def test_a_run_says_where_its_seconds_went(project: Project) -> None:
    """The file beside the records has parts that the run can have had, and the command shows them."""
    project.python_variant("good")
    run = project.suite(ONE_CASE, "--fa-variant=good", "--fa-soak=1")
    assert run.ret == pytest.ExitCode.OK
    (log,) = project.logs
    seconds = read_run_seconds(log)
    assert isinstance(seconds, RunSeconds)
    assert {"correct": 1, "speed": 1} == {kind: seconds.tests[kind].count for kind in ("correct", "speed")}
    calls = sum(each.call_seconds for each in seconds.tests.values())
    assert 0 < seconds.start_seconds < seconds.total_seconds <= run.seconds + 0.1
    assert calls + seconds.fixture_seconds + seconds.answer_seconds <= seconds.total_seconds
    assert all(record.costs and record.costs.job_seconds > 0 for record in project.records)
    table = subprocess.run(
        [sys.executable, "-m", "pytest_fa", "costs"],
        cwd=project.folder,
        env=inner_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"| total | {seconds.total_seconds:.2f} | 100 % |\n" in table


def test_a_run_without_records_writes_nothing(project: Project) -> None:
    """A run without kernels leaves no file."""
    project.write("test_own.py", "def test_own():\n    pass\n")
    assert project.run("test_own.py").ret == pytest.ExitCode.OK
    assert not (project.folder / "artifacts").exists()
