"""pytest-xdist: the workers run the tests, and the controller keeps and shows their records."""

from __future__ import annotations

import itertools
import re

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.projects import CASE, SHAPE, WRITE_MODULES, NewProject, Project, Run

pytest.importorskip("xdist")

CASES = [CASE, f"{SHAPE}-seed1"]


@pytest.fixture(scope="module")
def pair(new_project: NewProject) -> Project:
    """Two variants for the CPU and one that needs a GPU; each inner process writes a list of its modules."""
    project = new_project("xdist")
    project.write("conftest.py", WRITE_MODULES)
    project.python_variant("first")
    project.python_variant("second")
    project.cuda_variant("zero")
    return project


@pytest.fixture(scope="module")
def run(pair: Project) -> Run:
    """A run of both CPU variants on two cases with two workers."""
    return pair.suite("-n2", f"--fa-case={','.join(CASES)}", "--fa-variant=first,second", "-k", "test_correct")


def test_every_record_arrives(pair: Project, run: Run) -> None:
    """The records of all workers are in the single record file of the run."""
    assert run.ret == pytest.ExitCode.OK
    (log,) = pair.logs
    ids = sorted(record.id for record in pair.records)
    assert (len(log.read_bytes().splitlines()), ids) == (
        4,
        [f"{variant}-{case}" for variant in ("first", "second") for case in CASES],
    )


def test_table_is_printed_once(run: Run) -> None:
    """Only the controller shows the header line, the table and the path of the record file."""
    lines = run.all_lines
    counts = [
        sum(line.startswith("fa: no GPU; ") for line in lines),
        sum(" attention kernels " in line for line in lines),
        sum(line.startswith("records: ") for line in lines),
    ]
    assert counts == [1, 1, 1]


def test_table_has_every_case(run: Run) -> None:
    """The rows of the table count the cases of all workers."""
    rows = sorted(line.split()[:3] for line in run.all_lines if line.lstrip().startswith(("first ", "second ")))
    assert rows == [["first", "ok", "2/2"], ["second", "ok", "2/2"]]


def test_junit_has_every_headline(run: Run) -> None:
    """The `fa` property of every test is in the controller's JUnit file."""
    assert [each.get("name") for each in run.junit.iter("property")] == ["fa"] * 4


def test_no_process_imports_torch(pair: Project, run: Run) -> None:
    """Neither the controller nor the two workers import torch."""
    assert run.ret == pytest.ExitCode.OK
    assert [names & {"torch", "tvm_ffi"} for names in pair.modules] == [set()] * 3


def test_nothing_ran_is_red(project: Project, snapshot: SnapshotAssertion) -> None:
    """If nothing ran, the run fails and the controller says so once."""
    project.cuda_variant("zero")
    result = project.suite("-n1", f"--fa-case={CASE}", "-k", "test_correct", "--fa-no-build")
    lines = [line for line in result.all_lines if line.startswith("fa: nothing ran: ")]
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert snapshot == lines


def test_usage_error_is_one_line(project: Project) -> None:
    """A wrong name is a usage error of one line before any worker starts."""
    project.python_variant("first")
    result = project.suite("-n2", "--fa-variant=fisrt")
    expected = ["ERROR: --fa-variant: no variant 'fisrt'; did you mean 'first'? (see --fa-list)"]
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, expected)


def workers_of(result: Run) -> dict[str, str]:
    """The worker of each test."""
    lines = [re.match(r"\[(gw[0-9]+)\] .*(?:PASSED|FAILED|SKIPPED) (\S+)", line) for line in result.all_lines]
    return {match[2].partition("::")[2]: match[1] for match in lines if match}


@pytest.mark.nightly
def test_a_candidate_meets_its_baselines(project: Project) -> None:
    """All timed tests of a shape, and the check of its first seed, run in one worker."""
    project.python_variant("first")
    shapes = ("b1h1s16d64-fp16", "b1h1s32d64-fp16")
    cases = ",".join(f"{shape}-seed{seed}" for shape in shapes for seed in (0, 1))
    result = project.suite("-n2", "-v", f"--fa-case={cases}")
    assert result.ret == pytest.ExitCode.OK, result.text
    workers = workers_of(result)
    for shape in shapes:
        timed = {worker for test, worker in workers.items() if f"{shape}]" in test or f"{shape}-seed0]" in test}
        assert len(timed) == 1
    assert len(set(workers.values())) == 2


@pytest.mark.nightly
def test_a_worker_seldom_goes_on_to_another_variant(project: Project) -> None:
    """If nothing is timed, the tests of a variant are in two parts here, and a worker runs each part in a row."""
    names = ("first", "second", "third")
    for name in names:
        project.python_variant(name)
    cases = ",".join(f"b1h1s{length}d64-fp16-seed0" for length in (16, 32, 48, 64))
    result = project.suite("-n2", "-v", f"--fa-case={cases}", "-k", "test_correct")
    assert result.ret == pytest.ExitCode.OK, result.text
    of_worker: dict[str, list[str]] = {}
    for test, worker in workers_of(result).items():
        of_worker.setdefault(worker, []).append(test.partition("[")[2].partition("-")[0])
    rows = [name for variants in of_worker.values() for name, _ in itertools.groupby(variants)]
    assert (set(rows), len(rows) <= 2 * len(names)) == (set(names), True)


def test_the_user_may_choose_a_distribution(project: Project) -> None:
    """With --dist, xdist's own scheduler distributes the tests, with its own ids."""
    project.python_variant("first")
    cases = ",".join(f"b1h1s16d64-fp16-seed{seed}" for seed in range(4))
    result = project.suite("-n2", "-v", f"--fa-case={cases}", "--dist=loadfile", "-k", "test_correct")
    assert result.ret == pytest.ExitCode.OK, result.text
    assert len(set(workers_of(result).values())) == 1


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_builds_are_made_before_the_workers_start(project: Project) -> None:
    """The controller compiles each variant once and says so; with -k, the workers do it under a lock."""
    project.cuda_variant("zero")
    result = project.suite("-n2", "--fa-static", "--fa-arch=sm_90a", "--fa-variant=zero")
    lines = [line for line in result.all_lines if line.startswith(("fa: building", "fa: built", "created: "))]
    assert result.ret == pytest.ExitCode.OK, result.text
    assert lines, result.text


OWN_TESTS = """\
import pytest


def test_fails():
    assert False


@pytest.mark.fa_suite("smoke")
def test_mine(fa_variant, fa_case, fa_run):
    fa_run.correct(fa_variant, fa_case)
"""


def test_a_failure_before_the_first_kernel_counts(project: Project) -> None:
    """Without an option of this plugin, the first report of a kernel begins the table; earlier failures are kept."""
    project.python_variant("mine")
    project.write("test_own.py", OWN_TESTS)
    run = project.run("-n1", "test_own.py")
    assert run.all_lines[-1].startswith("mine: 2/2 checks passed")
    assert run.all_lines[-1].endswith("; 1 test failed without a result")
