"""--fa-cache, --fa-no-build, --fa-clean."""

from __future__ import annotations

import os
import shlex
import shutil
import threading

import pytest

from pytest_fa.locks import held_lock
from tests.projects import CASE, ONE_CASE, NewProject, Project, Run
from tests.tiers import nightly_after

pytestmark = pytest.mark.needs_nvcc

OTHER = "zero@BLOCK=32"
SECONDS = 120.0  # for a run on a busy machine


@pytest.fixture(scope="module")
def owner(new_project: NewProject) -> Project:
    """A project with its own cache, which contains one build."""
    project = new_project("owner")
    project.cuda_variant("zero")
    assert is_compiled(build(project))
    return project


def build(project: Project, *arguments: str) -> Run:
    """Build a variant for one architecture into the project's own cache."""
    return project.suite("-k", "test_build", "--fa-arch=sm_80", "--fa-cache=builds", *arguments)


def is_compiled(result: Run) -> bool:
    """Whether the run called the compiler."""
    return "fa: building 1 with" in result.text


def test_cache_contains_the_build(owner: Project) -> None:
    """The build is in --fa-cache, at the path that its record names."""
    (build,) = owner.records[0].builds
    assert (owner.folder / "builds" / build.library).is_file()


@pytest.mark.parametrize(
    ("arguments", "compiles"),
    nightly_after(2, [([], False), (["--fa-no-build"], False), (["--fa-clean"], True)]),
    ids=str,
)
def test_cached_builds_are_not_compiled_again(owner: Project, arguments: list[str], *, compiles: bool) -> None:
    """A cached build is compiled again only after --fa-clean has removed it."""
    result = build(owner, *arguments)
    assert (is_compiled(result), result.outcomes) == (compiles, {"test_build[zero]": "passed"})


def test_no_build_fails_without_a_build(owner: Project) -> None:
    """--fa-no-build compiles nothing and fails for a variant that was never built, with what to do about it."""
    result = build(owner, f"--fa-variant={OTHER}", "--fa-no-build")
    line = result.reasons[f"test_build[{OTHER}]"].splitlines()[0]
    why = "it was never built with these flags and definitions; drop --fa-no-build, or build it there first"
    expected = f"not built: no build in {owner.folder / 'builds'}: {why} ({OTHER} for sm_80)"
    assert (is_compiled(result), line) == (False, expected)


def test_no_build_stays_in_the_rerun_command(owner: Project) -> None:
    """The rerun command of a failure under --fa-no-build contains that option, too."""
    result = build(owner, f"--fa-variant={OTHER}", "--fa-no-build")
    (line,) = [each for each in result.outlines if each.startswith("  rerun: ")]
    assert "--fa-no-build" in shlex.split(line)


def test_python_variant_needs_no_cache(project: Project) -> None:
    """If no selected variant is compiled, a cache that cannot be written does not matter."""
    project.python_variant("good")
    result = project.suite(ONE_CASE, "-k", "test_correct", "--fa-cache=pytest.ini")
    assert result.outcomes == {f"test_correct[good-{CASE}]": "passed"}


@pytest.mark.parametrize("arguments", nightly_after(1, [["-q"], ["-v"], ["-q", "--fa-clean"], ["-qq"]]), ids=" ".join)
def test_a_wait_for_a_build_is_said(owner: Project, arguments: list[str]) -> None:
    """One line names the build and the process that holds it while it is waited for, also with -q."""
    cache = owner.folder / "builds"
    (lock,) = (cache / "locks").glob("zero-sm_80-*.lock")
    for folder in (cache / "builds").glob("zero-sm_80-*"):
        shutil.rmtree(folder)
    is_over = threading.Event()

    def hold() -> None:
        with held_lock(lock, "the build"):
            is_over.wait(SECONDS)

    holder = threading.Thread(target=hold)
    holder.start()
    waiting = f"fa: waiting for the build of zero/sm_80, held by process {os.getpid()} ("
    with owner.started("-k", "test_build", "--fa-arch=sm_80", "--fa-cache=builds", *arguments) as process:
        assert process.stdout is not None
        lines = list[str]()
        while not (lines and lines[-1].startswith(waiting)) and (line := process.stdout.readline()):
            lines.append(line)
        was_said = bool(lines and lines[-1].startswith(waiting))
        is_over.set()
        lines += process.stdout.readlines()
    holder.join(SECONDS)
    assert (process.returncode, was_said) == (0, True), lines
    assert len([line for line in lines if line.startswith(waiting)]) == 1, lines
    is_quiet = arguments[0] != "-v"
    assert any(line.startswith("fa: building") for line in lines) != is_quiet
