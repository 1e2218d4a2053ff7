"""Under pytest-xdist: the workers judge, the controller keeps and shows."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import CASE, SHAPE, WRITE_MODULES, NewProject, Project, Run

pytest.importorskip("xdist")

CASES = [CASE, f"{SHAPE}-seed1"]


@pytest.fixture(scope="module")
def pair(new_project: NewProject) -> Project:
    """Two variants for the CPU and one that needs a GPU; each inner process leaves a list of its modules."""
    project = new_project("xdist")
    project.write("conftest.py", WRITE_MODULES)
    project.python_variant("first")
    project.python_variant("second")
    project.cuda_variant("zero")
    return project


@pytest.fixture(scope="module")
def run(pair: Project) -> Run:
    """Both CPU variants on two cases, by two workers."""
    return pair.suite("-n2", f"--fa-case={','.join(CASES)}", "--fa-variant=first,second", "-k", "test_correct")


def test_every_record_arrives(pair: Project, run: Run) -> None:
    """Every case's record reaches the one file of the run, whichever worker made it."""
    assert run.ret == pytest.ExitCode.OK
    (log,) = pair.logs
    found = sorted(record.id for record in pair.records)
    assert (len(log.read_bytes().splitlines()), found) == (
        4,
        [f"{variant}-{case}" for variant in ("first", "second") for case in CASES],
    )


def test_table_is_printed_once(run: Run) -> None:
    """Header line, table and record file are shown by the controller alone."""
    lines = run.said
    counts = [
        sum(each.startswith("fa: no GPU; ") for each in lines),
        sum(" attention kernels " in each for each in lines),
        sum(each.startswith("records: ") for each in lines),
    ]
    assert counts == [1, 1, 1]


def test_table_has_every_case(run: Run) -> None:
    """The table's rows count the cases of all workers."""
    rows = sorted(line.split()[:4] for line in run.said if line.lstrip().startswith(("first", "second")))
    assert rows == [["first", SHAPE, "ok", "2/2"], ["second", SHAPE, "ok", "2/2"]]


def test_junit_has_every_headline(run: Run) -> None:
    """JUnit's `fa` property survives the way to the controller."""
    assert [each.get("name") for each in run.junit.iter("property")] == ["fa"] * 4


def test_no_process_imports_torch(pair: Project, run: Run) -> None:
    """Controller and workers stay without torch: three processes."""
    assert run.ret == pytest.ExitCode.OK
    assert [names & {"torch", "tvm_ffi"} for names in pair.modules] == [set()] * 3


def test_nothing_ran_is_red(project: Project) -> None:
    """The controller knows that nothing ran, and says it once."""
    project.cuda_variant("zero")
    result = project.suite("-n1", f"--fa-case={CASE}", "-k", "test_correct", "--fa-no-build")
    told = [line for line in result.said if line.startswith("fa: nothing ran: ")]
    assert (result.ret, told) == (
        pytest.ExitCode.TESTS_FAILED,
        ["fa: nothing ran: all that was selected was skipped (1)"],
    )


def test_usage_error_is_one_line(project: Project) -> None:
    """A wrong name ends the run before any worker starts."""
    project.python_variant("first")
    result = project.suite("-n2", "--fa-variant=fisrt")
    expected = ["ERROR: --fa-variant: no variant 'fisrt'; did you mean 'first'? (see --fa-list)"]
    assert (result.ret, result.said) == (pytest.ExitCode.USAGE_ERROR, expected)
