"""A project that has nothing to do with kernels, and has the plugin installed."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import WRITE_MODULES, NewProject, Project, Run


@pytest.fixture(scope="module")
def unrelated(new_project: NewProject) -> Project:
    """One test, and a list of modules at the end."""
    project = new_project("unrelated")
    project.write("conftest.py", WRITE_MODULES)
    project.write("test_sum.py", "def test_sum():\n    assert 1 + 1 == 2\n")
    return project


@pytest.fixture(scope="module")
def run(unrelated: Project) -> Run:
    """A run without options."""
    return unrelated.run("-p", "no:cacheprovider")


def test_it_runs(run: Run) -> None:
    """Its test passes and the exit status is 0."""
    assert (run.ret, run.outcomes) == (pytest.ExitCode.OK, {"test_sum": "passed"})


def test_it_prints_no_line_of_ours(run: Run) -> None:
    """Beside pytest's own list of plugins nothing mentions us."""
    assert [line for line in run.said if "fa:" in line or "attention" in line or "kernels" in line] == []


def test_it_imports_nothing_heavy(unrelated: Project, run: Run) -> None:
    """Neither torch nor msgspec, nor anything of ours beyond options and fixtures, is imported."""
    assert run.ret == pytest.ExitCode.OK
    (modules,) = unrelated.modules
    heavy = {"torch", "msgspec", "numpy", "yaml", "rich.table", "pynvml", "pytest_fa.session", "pytest_fa.catalog"}
    assert modules & {*heavy, "pytest_fa.plugin"} == {"pytest_fa.plugin"}


def test_it_leaves_no_files(unrelated: Project, run: Run) -> None:
    """Nothing is written but what the project itself, pytest and pytest-benchmark write."""
    assert run.ret == pytest.ExitCode.OK
    names = {path.name for path in unrelated.folder.iterdir() if not path.name.startswith((".", "__", "modules-"))}
    assert names == {"conftest.py", "junit.xml", "pytest.ini", "test_sum.py"}


def test_broken_kernels_do_not_matter(project: Project) -> None:
    """A kernels folder with a broken manifest is not even read by tests that ask for no variant."""
    project.write("kernels/broken/variant.yaml", "step: [\n")
    project.write("test_sum.py", "def test_sum():\n    assert 1 + 1 == 2\n")
    result = project.run()
    assert (result.ret, result.outcomes) == (pytest.ExitCode.OK, {"test_sum": "passed"})
