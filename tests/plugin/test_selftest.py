"""`--fa-selftest`: what runs on a CPU finds every Python fault by its check, and blames no twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.faults import CHECKS, FAULTS, ON_GPU_ONLY, TWINS, disappointment
from pytest_fa.catalog.properties import ON_GPU
from pytest_fa.session.run_plan import SELFTEST_KERNELS
from tests.plugin.conftest import Project, Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Run]:
    """One run of the self-test in an empty folder, on the CPU."""
    project = Project(tmp_path_factory.mktemp("selftest"), tmp_path_factory.mktemp("cache"))
    project.ini()
    return project, project.run("--fa-selftest", "--fa-no-build", "--fa-watchdog=3")


def names() -> list[str]:
    """Every kernel of the self-test."""
    return [each.name for each in discover((SELFTEST_KERNELS,)).variants.values() if each.root == str(SELFTEST_KERNELS)]


def test_every_kernel_has_its_line() -> None:
    """No kernel of the self-test is without the check that must find it, and no line is without a kernel."""
    assert sorted(names()) == sorted((*FAULTS, *TWINS))


def test_every_check_is_needed() -> None:
    """Each check and property is the only one to find some fault."""
    only = {fault.caught_by for fault in FAULTS.values() if fault.only}
    assert sorted(set(CHECKS) - only) == []


def test_every_check_that_a_cpu_can_make_is_needed_there() -> None:
    """The Python faults alone show the need for every check that does not ask for a GPU."""
    only = {fault.caught_by for name, fault in FAULTS.items() if fault.only and not name.startswith("cuda_")}
    assert sorted(set(CHECKS) - only - ON_GPU - set(ON_GPU_ONLY)) == []


def test_python_faults_are_found_and_twins_are_not(run: tuple[Project, Run]) -> None:
    """On a CPU every Python kernel of the self-test ends as it must; CUDA ones are skipped with a reason."""
    _, result = run
    expected = {f"test_judge[{name}]": "skipped" if name.startswith("cuda_") else "passed" for name in names()}
    assert result.outcomes == expected
    assert {reason for reason in result.reasons.values() if "needs a GPU" not in reason} == set()


def test_the_matrix_is_shown(run: tuple[Project, Run]) -> None:
    """The terminal says of every kernel by which checks it was found."""
    project, result = run
    found = {record.variant: record.caught_by for record in project.records}
    assert len(found) == len([name for name in names() if not name.startswith("cuda_")])
    rows = {line.split()[0]: line for line in result.outlines if line.strip() and line.split()[0] in found}
    assert all(", ".join(checks) or "nothing" in rows[name] for name, checks in found.items())


@pytest.mark.parametrize(
    ("name", "caught_by", "said"),
    [
        ("gain_only", ["gain"], ""),
        ("gain_only", [], "it must be found by gain; it was found by nothing"),
        ("gain_only", ["max"], "it must be found by gain; it was found by max"),
        ("gain_only", ["gain", "max"], "only gain may find it; it was found by gain, max"),
        ("wrong_scale", ["max", "gain"], ""),
        ("twin_right", [], ""),
        ("twin_right", ["max"], "a right kernel was blamed by max"),
    ],
)
def test_too_little_and_too_much_fail(name: str, caught_by: list[str], said: str) -> None:
    """A fault that its check misses, one that others find too, and a twin that is blamed: each is said."""
    assert disappointment(name, caught_by) == said


def test_the_suite_itself_is_not_collected(tmp_path: Path) -> None:
    """The self-test's file is no part of the shipped suite."""
    project = Project(tmp_path, tmp_path / "cache")
    project.ini()
    assert not [each for each in project.ids() if "test_judge" in each]
