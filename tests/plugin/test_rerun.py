"""Rerun commands: pasted into the folder in which it was printed, each one runs its test and fails in the same way."""

from __future__ import annotations

import re
import shutil
import subprocess
from xml.etree import ElementTree as ET

import pytest

from tests.factories import CUDA_SOURCE, PYTHON_SOURCE
from tests.projects import (
    CASE,
    COMPANIONS,
    ONE_CASE,
    PROGRAMS,
    SHAPE,
    WRONG_SOURCE,
    ZERO_MANIFEST,
    NewProject,
    Project,
    inner_environment,
)
from tests.tiers import nightly_after

# A user's own tests that run kernels through `fa_run`.
OWN_TESTS = """\
import pytest


def test_correct_elsewhere(fa_variant, fa_case, fa_run):
    fa_run.correct(fa_variant, fa_case)


@pytest.mark.fa_suite("smoke")
def test_marked(fa_variant, fa_case, fa_run):
    fa_run.correct(fa_variant, fa_case)


@pytest.mark.fa_gate(0.5)
def test_beats(fa_variant, fa_run):
    fa_run.gate(fa_variant)
"""


class Shell:
    """A shell in which `pytest` and `python` are those of this environment."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self.printed = ""  # by the latest command of `outcomes`
        fixed = {"XDG_CACHE_HOME": str(project.cache), "PYTEST_FA_SERVER": project.server}
        self._environment = {**inner_environment(), "PY_COLORS": "0", "COLUMNS": "140", **fixed}

    def type(self, command: str, folder: str = ".") -> str:
        """Run a command line in a folder of the project; return what it prints."""
        process = subprocess.run(
            [str(shutil.which("bash")), "-c", PROGRAMS + command],
            cwd=self._project.folder / folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return process.stdout + process.stderr

    def outcomes(self, command: str, folder: str = ".") -> dict[str, str]:
        """Run a command line; return the outcome of each test by its file and name, and fail without any test."""
        report = self._project.folder / folder / "pasted.xml"
        report.unlink(missing_ok=True)
        self.printed = self.type(f"{command} --junitxml=pasted.xml", folder)
        assert report.is_file(), self.printed
        cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314  # a trusted file
        return {f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}": outcome_of(case) for case in cases}


def outcome_of(case: ET.Element) -> str:
    """The outcome of one test in a JUnit file."""
    return next((tag for tag in ("error", "failure", "skipped") if case.find(tag) is not None), "passed")


def reruns(printed: str) -> list[str]:
    """The rerun commands that a run printed, each once."""
    return list(dict.fromkeys(re.findall(r"^ *rerun: (.*)$", printed, re.MULTILINE)))


def without_times(printed: str) -> list[str]:
    """The lines of the failures, without those that depend on the speed of the machine."""
    return [line for line in printed.splitlines() if re.match(r"  +(policy|stages|max|elements|first bad|worst)", line)]


@pytest.fixture(scope="module")
def lab(new_project: NewProject) -> Project:
    """Wrong kernels, one of which has the name of a property and of a test, and files that could be confused."""
    project = new_project("rerun")
    project.python_variant("wrong", WRONG_SOURCE)
    project.python_variant("hard_data_test_speed", WRONG_SOURCE)
    project.python_variant("quick", PYTHON_SOURCE)
    project.cuda_variant("zero", CUDA_SOURCE.replace("float", "flaot", 1), ZERO_MANIFEST)
    project.write("own/test_own.py", OWN_TESTS)
    project.write("own/test_attention.py", "def test_correct():\n    pass\n")
    project.write("sub/other.ini", "[pytest]\nfa_kernels = ../kernels\nfa_tolerance = same_precision\n")
    return project


@pytest.fixture
def shell(lab: Project) -> Shell:
    """A shell in the project."""
    return Shell(lab)


FAILURES = {
    "correct": (f"pytest --fa-variant=wrong {ONE_CASE} -k test_correct", f"test_attention::test_correct[wrong-{CASE}]"),
    "by id": (
        f"pytest 'test_attention.py::test_correct[wrong-{CASE}]'",
        f"test_attention::test_correct[wrong-{CASE}]",
    ),
    "option with quotes": (
        f"pytest -o 'fa_tolerance=absolute' --fa-cache='a b' --fa-variant=wrong {ONE_CASE} -k test_correct",
        f"test_attention::test_correct[wrong-{CASE}]",
    ),
    "name of a test": (
        f"pytest --fa-variant=hard_data_test_speed {ONE_CASE} -k 'test_correct'",
        f"test_attention::test_correct[hard_data_test_speed-{CASE}]",
    ),
    "property": (
        "pytest --fa-variant=hard_data_test_speed -k 'test_property and new_shape'",
        "test_attention::test_property[hard_data_test_speed-new_shape]",
    ),
    "own test": (
        f"pytest own/test_own.py --fa-variant=wrong {ONE_CASE} -k elsewhere",
        f"test_own::test_correct_elsewhere[wrong-{CASE}]",
    ),
    "own test with a suite and a seed": (
        "pytest own --fa-variant=wrong --fa-seeds=7, -k 'marked and b1h2s64d64-fp16'",
        f"test_own::test_marked[wrong-{SHAPE}-seed7]",
    ),
}


@pytest.mark.parametrize(("command", "test"), nightly_after(1, FAILURES.values()), ids=FAILURES)
def test_a_pasted_command_fails_in_the_same_way(shell: Shell, command: str, test: str) -> None:
    """The rerun command of a failure runs exactly that test, whose failure has the same lines."""
    printed = shell.type(command)
    (rerun,) = reruns(printed)
    assert shell.outcomes(rerun) == {test: "failure"}
    assert without_times(shell.printed) == without_times(printed) != []


@pytest.mark.parametrize(
    ("folder", "command"),
    nightly_after(
        1,
        [
            ("sub", f"pytest --fa-variant=wrong {ONE_CASE} -k test_correct"),
            ("sub", f"pytest -c other.ini --fa-variant=wrong {ONE_CASE} -k test_correct"),
            ("sub", f"pytest --rootdir=.. --fa-variant=wrong {ONE_CASE} -k test_correct"),
            ("..", "pytest {root}/own/test_own.py --fa-variant=wrong " + f"{ONE_CASE} -k elsewhere"),
        ],
    ),
    ids=["sub-folder", "-c", "--rootdir", "own test from outside"],
)
def test_a_command_works_where_it_was_printed(lab: Project, shell: Shell, folder: str, command: str) -> None:
    """The command works in the folder in which pytest was started, also if that is not the root folder."""
    (rerun,) = reruns(shell.type(command.replace("{root}", lab.folder.name), folder))
    (outcome,) = shell.outcomes(rerun, folder).items()
    assert outcome[0].endswith(f"[wrong-{CASE}]")
    assert outcome[1] == "failure"


@pytest.mark.nightly
def test_other_tests_in_testpaths_are_not_rerun(lab: Project) -> None:
    """If the ini file sets `testpaths`, the rerun command selects the shipped suite itself."""
    lab.write("paths.ini", "[pytest]\ntestpaths = own\n")
    shell = Shell(lab)
    command = f"pytest -c paths.ini --pyargs pytest_fa.suite --fa-variant=wrong {ONE_CASE} -k test_correct"
    (rerun,) = reruns(shell.type(command))
    assert shell.outcomes(rerun) == {f"test_attention::test_correct[wrong-{CASE}]": "failure"}


@pytest.mark.nightly
def test_a_timing_is_rerun_with_its_companions(shell: Shell) -> None:
    """The rerun command of a timing runs it beside the companions, with the same --benchmark-disable."""
    (rerun,) = reruns(shell.type(f"pytest --benchmark-disable --fa-variant=wrong {ONE_CASE} -k 'test_speed and wrong'"))
    assert "--benchmark-disable" in rerun.split()
    outcomes = shell.outcomes(rerun)
    assert list(outcomes) == [f"test_attention::test_speed[{name}-{SHAPE}]" for name in ("wrong", *COMPANIONS)]
    assert outcomes[f"test_attention::test_speed[wrong-{SHAPE}]"] == "failure"


@pytest.mark.needs_nvcc
@pytest.mark.parametrize("static", nightly_after(1, ["", " --fa-static"]))
def test_a_build_is_rerun_with_its_definition(shell: Shell, static: str) -> None:
    """The rerun command of a failed build names the variant with its definitions, and repeats --fa-static."""
    (rerun,) = reruns(shell.type(f"pytest --fa-variant=zero@BLOCK=32{static} -k test_build"))
    assert f"pytest --fa-variant=zero@BLOCK=32{static} -k test_build" == rerun
    assert shell.outcomes(rerun) == {"test_attention::test_build[zero@BLOCK=32]": "failure"}


@pytest.mark.nightly
@pytest.mark.alone
def test_a_gate_is_rerun(shell: Shell) -> None:
    """The rerun commands of a gate of the suite and of a user's own gate run exactly that gate."""
    gate = f"pytest --fa-gate=0.01 --fa-gate-baseline=quick --fa-variant=quick {ONE_CASE} -k test_gate"
    (rerun,) = reruns(shell.type(gate))
    assert shell.outcomes(rerun) == {"test_attention::test_gate[quick]": "failure"}
    (rerun,) = reruns(shell.type(f"pytest own --fa-variant=quick {ONE_CASE} -k beats"))
    assert rerun == f"pytest --fa-variant=quick {ONE_CASE} --fa-gate=0.5 'own/test_own.py::test_beats[quick]'"
    assert shell.outcomes(rerun) == {"test_own::test_beats[quick]": "failure"}


@pytest.mark.nightly
def test_the_self_test_is_rerun(shell: Shell) -> None:
    """The rerun command of the self-test runs that kernel of the self-test.

    A watchdog of 0.02 s ends the first call of every kernel, so that a correct one fails.
    """
    printed = shell.type("pytest --fa-selftest --fa-watchdog=0.02 --fa-variant=twin_right")
    (rerun,) = reruns(printed)
    assert rerun == "pytest --fa-watchdog=0.02 --fa-selftest --fa-variant=twin_right"
    assert shell.outcomes(rerun) == {"selftest::test_judge[twin_right]": "failure"}


@pytest.mark.nightly
def test_the_self_test_without_timing(shell: Shell) -> None:
    """With --benchmark-disable the kernel that is wrong only in timed calls is skipped with that reason."""
    printed = shell.type("pytest --fa-selftest --benchmark-disable --fa-variant=kept_when_moved -rs")
    reason = "only timed calls show the mistake of kept_when_moved, and --benchmark-disable switches timing off"
    assert reason in printed
    assert "1 skipped" in printed


@pytest.mark.nightly
def test_a_path_with_blanks(new_project: NewProject) -> None:
    """In folders with blanks a variant compiles, a wrong one fails, and its rerun command can be pasted."""
    project = new_project("a folder with blanks")
    project.cuda_variant("zero", root="my kernels")
    project.python_variant("wrong", WRONG_SOURCE, root="my kernels")
    shell = Shell(project)
    options = "'--fa-kernels=my kernels' '--fa-cache=my cache'"
    tests = {"test_attention::test_build[zero]": "passed", f"test_attention::test_correct[wrong-{CASE}]": "failure"}
    command = f"pytest {options} --fa-variant=zero,wrong {ONE_CASE} -k 'test_build or (test_correct and wrong)'"
    assert shell.outcomes(command) == tests
    (rerun,) = {line.partition("rerun: ")[2] for line in shell.printed.splitlines() if "rerun: " in line}
    assert shell.outcomes(rerun) == dict([*tests.items()][1:])
