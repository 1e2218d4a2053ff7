"""`--fa-selftest` on a CPU: every wrong Python kernel is rejected by its check, and no correct twin is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.properties import ON_GPU
from pytest_fa.features.selftest.exploits import EXPLOITS, HONEST_TWINS
from pytest_fa.features.selftest.faults import CHECKS, FAULTS, ON_GPU_ONLY, TWINS, detection_problem
from pytest_fa.features.selftest.matrix import render_matrix
from pytest_fa.features.selftest.plugin import FOLDER as SELFTEST_KERNELS
from pytest_fa.records.outcome import Outcome
from tests.factories import record
from tests.projects import Project, Run


class SelfTest(NamedTuple):
    """A run of the self-test with these kernels, in a project of its own."""

    names: list[str]
    project: Project
    run: Run


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.nightly)])
def selftest(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, resident_server: str
) -> SelfTest:
    """A run in an empty folder, on the CPU: of a kernel for each check and of some correct ones, or of all.

    The few leave out faults of parts of attention, which take a third of the time; test_part_faults.py and
    test_backward_faults.py judge them in their own process.
    """
    chosen = names()
    if request.param == "few":
        in_plain_attention = {name: fault for name, fault in FAULTS.items() if not fault.shapes}
        of_checks = {fault.caught_by: name for name, fault in in_plain_attention.items() if fault.only}
        chosen = [*of_checks.values(), *TWINS[:4]]
    project = Project(tmp_path_factory.mktemp("selftest"), tmp_path_factory.mktemp("cache"), resident_server)
    project.ini()
    options = ("--fa-selftest", "--fa-no-build", "--fa-watchdog=15", f"--fa-variant={','.join(chosen)}")
    return SelfTest(chosen, project, project.run(*options, limit_seconds=1200))


def names() -> list[str]:
    """Every kernel with one mistake, and its correct twins; `test_exploits.py` has the other kernels."""
    return [*FAULTS, *TWINS]


def test_every_kernel_is_listed() -> None:
    """The kernels of the self-test are exactly those listed as faults, exploits and correct kernels."""
    known = discover((SELFTEST_KERNELS,)).variants.values()
    listed = (*names(), *EXPLOITS, *HONEST_TWINS)
    assert sorted(listed) == sorted(each.name for each in known if each.root == str(SELFTEST_KERNELS))


def test_every_check_is_needed() -> None:
    """Each check and property is the only one that rejects some kernel."""
    only = {fault.caught_by for fault in FAULTS.values() if fault.only}
    assert sorted(set(CHECKS) - only) == []


def test_every_check_that_a_cpu_can_make_is_needed_there() -> None:
    """The Python kernels alone show that every check that needs no GPU is needed."""
    only = {fault.caught_by for name, fault in FAULTS.items() if fault.only and not name.startswith("cuda_")}
    assert sorted(set(CHECKS) - only - ON_GPU - set(ON_GPU_ONLY)) == []


def is_in_cuda(name: str) -> bool:
    """Whether a kernel of the self-test is compiled."""
    return name.startswith("cuda_")


def test_python_faults_are_rejected_and_twins_are_not(selftest: SelfTest) -> None:
    """On a CPU every Python kernel has the expected result; CUDA kernels are skipped with a reason."""
    expected = {f"test_judge[{name}]": "skipped" if is_in_cuda(name) else "passed" for name in selftest.names}
    assert selftest.run.outcomes == expected
    assert {reason for reason in selftest.run.reasons.values() if "needs a GPU" not in reason} == set()


def test_the_matrix_is_shown(selftest: SelfTest) -> None:
    """The terminal shows for every kernel the checks that rejected it."""
    caught_by = {each.variant: each.caught_by for each in selftest.project.records}
    assert len(caught_by) == len([name for name in selftest.names if not is_in_cuda(name)])
    rows = dict(line.split(None, 1) for line in selftest.run.outlines if line.strip().count(" ") > 1)
    for name, checks in caught_by.items():
        shown, _, more = rows[name].strip().partition(" and ")
        assert shown.split(", ") == list(checks[: len(checks) - int(more.partition(" ")[0] or 0)] or ("no check",))


def test_checks_that_do_not_fit_are_counted() -> None:
    """A row that is too wide shows its first checks and the number of the others."""
    caught = record("wrong", outcome=Outcome.WRONG, caught_by=("max", "rms", "row rms", "gain"))
    widths = {width: render_matrix([caught], width).splitlines()[0] for width in (10, 32, 33, 36, 37)}
    assert widths == {
        10: "wrong  WRONG: max and 3 more",
        32: "wrong  WRONG: max and 3 more",
        33: "wrong  WRONG: max, rms and 2 more",
        36: "wrong  WRONG: max, rms and 2 more",
        37: "wrong  WRONG: max, rms, row rms, gain",
    }


@pytest.mark.parametrize(
    ("name", "caught_by", "problem"),
    [
        ("gain_only", ["gain"], ""),
        ("gain_only", [], "gain must reject this kernel; it was rejected by no check"),
        ("gain_only", ["max"], "gain must reject this kernel; it was rejected by max"),
        ("gain_only", ["gain", "max"], "only gain may reject this kernel; it was rejected by gain, max"),
        ("wrong_scale", ["max", "gain"], ""),
        ("twin_right", [], ""),
        ("twin_right", ["max"], "a correct kernel was rejected by max"),
    ],
)
def test_missing_and_additional_checks_fail(name: str, caught_by: list[str], problem: str) -> None:
    """A fault that its check misses, a fault that other checks reject, too, and a rejected twin are problems."""
    assert detection_problem(name, caught_by) == problem


def test_the_suite_itself_is_not_collected(tmp_path: Path) -> None:
    """The shipped suite does not contain the tests of the self-test."""
    project = Project(tmp_path, tmp_path / "cache")
    project.ini()
    assert not [test_id for test_id in project.ids() if "test_judge" in test_id]
