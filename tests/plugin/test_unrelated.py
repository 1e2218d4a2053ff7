"""A project without kernels, in an environment in which the plugin is installed."""

from __future__ import annotations

import pytest

from tests.projects import WRITE_MODULES, NewProject, Project, Run


@pytest.fixture(scope="module")
def unrelated(new_project: NewProject) -> Project:
    """A project with one test, whose process writes a list of its modules at the end."""
    project = new_project("unrelated")
    project.write("conftest.py", WRITE_MODULES)
    project.write("test_sum.py", "def test_sum():\n    assert 1 + 1 == 2\n")
    return project


@pytest.fixture(scope="module")
def run(unrelated: Project) -> Run:
    """A run without --fa options."""
    return unrelated.run("-p", "no:cacheprovider")


def test_it_runs(run: Run) -> None:
    """The test of the project passes, and the exit status is 0."""
    assert (run.ret, run.outcomes) == (pytest.ExitCode.OK, {"test_sum": "passed"})


def test_the_plugin_prints_nothing(run: Run) -> None:
    """The plugin prints no line of its own."""
    assert [line for line in run.all_lines if "fa:" in line or "attention" in line or "kernels" in line] == []


def test_it_imports_nothing_heavy(unrelated: Project, run: Run) -> None:
    """Neither torch nor msgspec, nor any module of the package except options, hooks and fixtures, is imported."""
    assert run.ret == pytest.ExitCode.OK
    (modules,) = unrelated.modules
    heavy = {"torch", "msgspec", "numpy", "yaml", "rich.table", "pynvml", "pytest_fa.session", "pytest_fa.catalog"}
    assert modules & {*heavy, "pytest_fa.plugin"} == {"pytest_fa.plugin"}


def test_the_plugin_writes_no_files(unrelated: Project, run: Run) -> None:
    """Only the project itself, pytest and pytest-benchmark write files."""
    assert run.ret == pytest.ExitCode.OK
    names = {path.name for path in unrelated.folder.iterdir() if not path.name.startswith((".", "__", "modules-"))}
    assert names == {"conftest.py", "junit.xml", "pytest.ini", "test_sum.py"}


def test_broken_kernels_do_not_matter(project: Project) -> None:
    """A broken manifest in the `kernels` folder does not affect tests that use no variant."""
    project.write("kernels/broken/variant.yaml", "step: [\n")
    project.write("test_sum.py", "def test_sum():\n    assert 1 + 1 == 2\n")
    result = project.run()
    assert (result.ret, result.outcomes) == (pytest.ExitCode.OK, {"test_sum": "passed"})
