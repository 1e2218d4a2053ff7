"""A machine without torch, or with one that cannot be imported: one sentence says it, with what to type."""

from __future__ import annotations

import os

import pytest

from pytest_fa.build.keys import PACKAGE
from tests.projects import CASE, ONE_CASE, Project, Run

MISSING = "No module named 'torch'"
SENTENCE = (
    "torch cannot be imported ({}), so no kernel can run: type `pip install torch`; `python -m pytest_fa doctor` "
)
ADVICE = "says what else is missing"
# Python reads this at its start: the finder of files then finds no torch, as if none were installed.
WITHOUT_TORCH = """\
from importlib.machinery import PathFinder

find = PathFinder.find_spec


@classmethod
def find_others(cls, name, path=None, target=None):
    return None if name == "torch" else find(name, path, target)


PathFinder.find_spec = find_others
"""


def run(project: Project, folder: str, *arguments: str) -> Run:
    """Run pytest with a folder in front of PYTHONPATH, and without a server that has imported torch already."""
    project.python_variant("good")
    path = os.pathsep.join([str(project.folder / folder), str(PACKAGE.parent)])
    return project.run(*arguments, env={"PYTHONPATH": path, "PYTEST_FA_SERVER": "off"})


def test_without_torch_a_run_ends_with_one_sentence(project: Project) -> None:
    """Nothing is collected, and no traceback is shown: the only line says what lacks and what to type."""
    project.write("without/sitecustomize.py", WITHOUT_TORCH)
    result = run(project, "without", "--fa-variant=good")
    assert (result.ret, result.all_lines) == (
        pytest.ExitCode.USAGE_ERROR,
        [f"ERROR: {SENTENCE.format(MISSING)}{ADVICE}"],
    )


def test_what_needs_no_torch_runs_without_it(project: Project) -> None:
    """The list of variants, and tests that use no kernel, do not miss it."""
    project.write("without/sitecustomize.py", WITHOUT_TORCH)
    project.write("test_plain.py", "def test_plain():\n    pass\n")
    assert run(project, "without", "--fa-list").ret == pytest.ExitCode.OK
    assert run(project, "without").outcomes == {"test_plain": "passed"}


def test_a_torch_that_cannot_be_imported_is_one_failure(project: Project) -> None:
    """A broken installation is found when a process imports it: one test fails with the sentence, no other one does."""
    error = "ImportError: libtorch_cpu.so: cannot open shared object file: No such file or directory"
    project.write("broken/torch/__init__.py", f"raise ImportError({error.removeprefix('ImportError: ')!r})\n")
    result = run(project, "broken", "--fa-variant=good", ONE_CASE, "--benchmark-disable")
    failed = [name for name, outcome in result.outcomes.items() if outcome == "failed"]
    assert (result.ret, failed) == (pytest.ExitCode.TESTS_FAILED, [f"test_correct[good-{CASE}]"])
    assert result.failure(failed[0])[0] == SENTENCE.format(error) + ADVICE
    assert "Traceback" not in result.text
