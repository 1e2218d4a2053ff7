"""A machine without a compiler: tests that need one are skipped with one clear line, the others run."""

from __future__ import annotations

import shutil

import pytest

from tests.projects import CASE, ONE_CASE, SHAPE, NewProject, Project, Run

# For an inner conftest.py: hides nvcc in wheels and in toolkits that the system's loader can find.
HIDE_WHEELS = """\
import pytest_fa.build.toolchain

pytest_fa.build.toolchain.find_tool = lambda name: None
"""
NO_NVCC = (
    "no CUDA compiler: CUDA_HOME is unset, nvcc is not on PATH, nor in wheels, conda or the usual places; "
    "install a CUDA toolkit, or `pip install 'pytest-fa[cuda13]'`"
)


@pytest.fixture(scope="module")
def bare(new_project: NewProject) -> Project:
    """One variant that is compiled and one for the CPU, with a host compiler and without nvcc."""
    project = new_project("bare")
    project.write("conftest.py", HIDE_WHEELS)
    project.cuda_variant("zero")
    project.python_variant("good")
    (project.folder / "bin").mkdir()
    for name in ("g++", "git"):
        if program := shutil.which(name):
            (project.folder / "bin" / name).symlink_to(program)
    return project


def run(project: Project, *arguments: str, **env: str) -> Run:
    """Run the suite with a PATH that contains only a few programs."""
    path = str(project.folder / "bin")
    return project.suite(ONE_CASE, "-rs", *arguments, env={"PATH": path, "CUDA_HOME": "", **env})


def test_build_is_skipped_with_one_line(bare: Project) -> None:
    """test_build is skipped; the reason lists the searched places and what to install."""
    result = run(bare, "-k", "zero")
    assert result.outcomes["test_build[zero]"] == "skipped"
    assert result.reasons["test_build[zero]"].endswith(NO_NVCC)


@pytest.mark.parametrize("selected", ["zero", "zero and test_build"])
def test_nothing_ran_is_red(bare: Project, selected: str) -> None:
    """A run in which every selected test is skipped for lack of a build fails with exit status 1 and says so."""
    result = run(bare, "-k", selected)
    lines = [line for line in result.all_lines if line.startswith("fa: nothing ran: ")]
    assert (result.ret, len(lines)) == (pytest.ExitCode.TESTS_FAILED, 1)


def test_python_variants_run(bare: Project) -> None:
    """Variants that need no compiler are judged, a companion that needs one is skipped, and the run passes."""
    result = run(bare, "-k", "test_build or test_correct or noop")
    assert (result.ret, result.outcomes) == (
        pytest.ExitCode.OK,
        {
            "test_build[zero]": "skipped",
            f"test_correct[good-{CASE}]": "passed",
            f"test_correct[zero-{CASE}]": "skipped",
            f"test_speed[noop-{SHAPE}]": "skipped",
        },
    )


def test_missing_host_compiler_is_named(bare: Project) -> None:
    """If nvcc exists but the host compiler in CXX does not, the reason says so."""
    nvcc = bare.folder / "bin" / "nvcc"
    nvcc.symlink_to(shutil.which("true") or "/bin/true")
    result = run(bare, "-k", "zero and test_build", CXX="no-such-compiler")
    nvcc.unlink()
    reason = "no host compiler: 'no-such-compiler' is not on PATH (CXX is no-such-compiler); install g++"
    assert result.reasons["test_build[zero]"].endswith(reason)
