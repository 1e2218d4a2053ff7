"""A machine on which two processes cannot share memory: cases are judged, marked as unprotected, and never gated."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.factories import PYTHON_SOURCE
from tests.projects import CASE, ONE_CASE, WRONG_SOURCE, NewProject, Project, Run, inner_environment

# For a folder on PYTHONPATH: every process is without memory files, as in some sandboxes.
NO_MEMORY_FILES = """\
import os


def memfd_create(*_):
    raise OSError(38, "Function not implemented")


os.memfd_create = memfd_create
"""
REASON = "two processes cannot share memory here: [Errno 38] Function not implemented"
# It makes memory files fail, but only once its own code runs.
BREAKS_SHARING = PYTHON_SOURCE.replace("import torch\n", "import os\n\nimport torch\n\nos.memfd_create = None\n", 1)


@pytest.fixture(scope="module")
def project(new_project: NewProject) -> Project:
    """A right variant and a wrong one, beside a folder that takes memory files away."""
    project = new_project("unprotected")
    project.python_variant("mine")
    project.python_variant("wrong", WRONG_SOURCE)
    project.write("site/sitecustomize.py", NO_MEMORY_FILES)
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    """Both variants on one case, with a gate."""
    options = ("--fa-variant=mine,wrong", "--fa-gate=1.0", "--fa-gate-baseline=mine", ONE_CASE)
    return project.suite(*options, "-k", "not sdpa", env=without_memory_files(project))


def without_memory_files(project: Project) -> dict[str, str]:
    """Variables that make every process run `NO_MEMORY_FILES`, also the server, which is not the waiting one."""
    return {"PYTHONPATH": str(project.folder / "site"), "PYTEST_FA_SERVER": "off"}


def test_cases_are_judged(run: Run) -> None:
    """A right variant is right and a wrong one is wrong; the reason stands once below the table."""
    assert run.outcomes[f"test_correct[mine-{CASE}]"] == "passed"
    assert run.outcomes[f"test_correct[wrong-{CASE}]"] == "failed"
    (line,) = [line for line in run.outlines if line.startswith("unprotected: ")]
    assert line.endswith(f"no time is gated: {REASON}")


def test_every_record_says_it(project: Project, run: Run) -> None:
    """The records of both variants have the reason, also that of the wrong one."""
    assert run.ret == 1
    judged = [record for record in project.records if record.kind in ("correct", "speed") and record.check]
    assert {(record.variant, record.unprotected) for record in judged} == {("mine", REASON), ("wrong", REASON)}


def test_no_time_is_gated(project: Project, run: Run, snapshot: SnapshotAssertion) -> None:
    """The gate has no verdict, with the reason, and no process of a gate starts."""
    assert run.outcomes["test_gate[mine]"] == "failed"
    (record,) = [record for record in project.records if record.id == "mine" and record.kind == "gate"]
    assert (record.outcome, record.added) == ("inconclusive", {})
    assert snapshot == record.message


@pytest.mark.nightly
def test_the_judge_command_gives_no_verdict(project: Project) -> None:
    """A right variant ends with the status `machine`, and a wrong one with `wrong`."""
    fixed = {"XDG_CACHE_HOME": str(project.cache), "PYTHONPATH": str(project.folder / "site")}
    environment = {**inner_environment(), **fixed}
    for name, status, code in (("mine", "machine", 5), ("wrong", "wrong", 1)):
        command = [sys.executable, "-m", "pytest_fa", "judge", name, "--json", f"--case={CASE}", "--gate-baseline=mine"]
        process = subprocess.run(command, cwd=project.folder, env=environment, stdout=subprocess.PIPE, check=False)
        document = json.loads(process.stdout)
        assert (process.returncode, document["status"]) == (code, status)
        assert status == "wrong" or document["reason"] == f"mine was judged unprotected: {REASON}"


@pytest.mark.nightly
def test_no_variant_can_take_the_protection_away(project: Project) -> None:
    """A variant that breaks memory files in its own process changes nothing for the judge."""
    project.python_variant("breaker", BREAKS_SHARING)
    project.suite("--fa-variant=breaker", ONE_CASE, "-k", "test_correct and breaker")
    (record,) = [record for record in project.records if record.variant == "breaker" and record.kind == "correct"]
    assert (record.outcome, record.unprotected) == ("ok", "")
