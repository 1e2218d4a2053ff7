"""pytest's own options do what they do elsewhere, with the shipped suite, a right variant and a wrong one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import pytest_fa
from tests.factories import PYTHON_MANIFEST
from tests.projects import CASE, ONE_CASE, SHAPE, WRONG_SOURCE, NewProject, Project
from tests.tiers import nightly_after

REPOSITORY = Path(__file__).parents[2]
SUITE = Path(pytest_fa.__file__).parent / "suite" / "test_attention.py"
RIGHT, WRONG = f"test_correct[right-{CASE}]", f"test_correct[wrong-{CASE}]"
CHECKS = ("--fa-variant=right,wrong", ONE_CASE, "-k", "test_correct")
TROUBLE = re.compile(r"INTERNALERROR|Traceback|Warning\b")


@pytest.fixture(scope="module")
def two(new_project: NewProject) -> Project:
    """A right variant and a wrong one."""
    project = new_project("two")
    project.python_variant("right")
    project.python_variant("wrong", WRONG_SOURCE)
    return project


@pytest.mark.parametrize(
    "arguments",
    nightly_after(
        1,
        [
            ("-q", "--color=no", "--tb=short"),
            ("-qq", "--tb=line"),
            ("-rA", "--color=yes", "--tb=no", "-o", "console_output_style=count"),
            ("-p", "no:terminal"),
            ("-p", "no:cacheprovider", "-o", "console_output_style=times", "-v"),
            ("-p", "no:benchmark", "-o", "console_output_style=classic", "--no-header", "--no-summary"),
        ],
        is_one_name=True,
    ),
    ids=" ".join,
)
def test_how_it_is_shown_changes_no_result(two: Project, arguments: tuple[str, ...]) -> None:
    """With each way to show results the right variant passes, the wrong one fails, and both have a record."""
    earlier = len(two.records)
    run = two.suite(*CHECKS, *arguments)
    assert (run.ret, run.outcomes) == (1, {RIGHT: "passed", WRONG: "failed"})
    assert (len(two.records) - earlier, TROUBLE.findall(run.text)) == (2, [])


def test_colors_are_only_where_they_are_wanted(two: Project) -> None:
    """--color=no writes no escape sequence."""
    assert "\x1b" not in two.suite(*CHECKS, "--color=no", "-k", "test_correct and wrong").text


@pytest.mark.nightly
def test_a_run_can_be_continued(two: Project) -> None:
    """-x ends with the first failure, --lf runs only what failed, --sw goes on there, --maxfail counts.

    Also --sw ends with the rerun command.
    """
    order = ("--fa-variant=wrong,right", ONE_CASE, "-k", "test_correct")
    assert (two.suite(*order, "-x").outcomes, two.suite(*order, "--lf").outcomes) == ({WRONG: "failed"},) * 2
    stopped = two.suite(*order, "--sw")
    assert (stopped.ret, stopped.all_lines[-1].startswith("rerun: pytest ")) == (pytest.ExitCode.INTERRUPTED, True)
    assert two.suite(*order, "--sw", "--sw-skip").outcomes == {WRONG: "failed", RIGHT: "passed"}
    assert two.suite(*order, "--maxfail=2").outcomes == {WRONG: "failed", RIGHT: "passed"}


@pytest.mark.nightly
def test_last_failed_without_another_option(new_project: NewProject) -> None:
    """A plain `pytest --lf` after a run of the suite repeats its failures, also of a variant that is no candidate."""
    project = new_project("last_failed")
    project.python_variant("right")
    project.python_variant("ablated", WRONG_SOURCE, PYTHON_MANIFEST + "role: ablation\n")
    failed = f"test_correct[ablated-{CASE}]"
    assert project.run("--fa-variant=ablated", ONE_CASE).outcomes[failed] == "failed"
    assert project.run("--lf").outcomes == {failed: "failed"}
    project.write("test_own.py", "def test_own():\n    assert 1 == 2\n\n\ndef test_fine():\n    pass\n")
    assert project.run("test_own.py").outcomes == {"test_own": "failed", "test_fine": "passed"}
    assert project.run("--lf").outcomes == {failed: "failed", "test_own": "failed"}
    shutil.rmtree(project.folder / "kernels" / "ablated")
    result = project.run("--lf")
    assert (result.ret, result.all_lines[0].startswith("ERROR: --fa-variant: no variant 'ablated'")) == (4, True)
    assert result.all_lines[0].endswith("; `pytest --cache-clear` makes pytest forget them")


@pytest.mark.nightly
def test_without_pytest_benchmark_times_are_only_recorded(two: Project) -> None:
    """With -p no:benchmark test_speed passes and its record has the times; another test still lacks the fixture."""
    run = two.suite("--fa-variant=right", ONE_CASE, "-p", "no:benchmark", "-k", "test_speed and right")
    assert (run.ret, run.outcomes) == (0, {f"test_speed[right-{SHAPE}]": "passed"}), run.text
    assert two.records[-1].speed is not None
    assert TROUBLE.findall(run.text) == []
    two.write("test_own.py", "def test_own(benchmark):\n    benchmark(int)\n")
    own = two.run("test_own.py", "-p", "no:benchmark")
    assert own.outcomes == {"test_own": "error"}
    assert "pytest-benchmark is switched off (-p no:benchmark)" in own.text


def test_a_junit_file_is_whole(two: Project) -> None:
    """--junit-xml names each test once, with the failure's text and the headline of its record."""
    assert two.suite(*CHECKS, "--junit-xml=other.xml").ret == 1
    cases = list(ET.parse(two.folder / "other.xml").iter("testcase"))  # noqa: S314  # our own file
    assert [case.get("name") for case in cases] == [RIGHT, WRONG]
    headlines = [prop.get("value", "") for case in cases for prop in case.iter("property")]
    assert [text.split(",")[0] for text in headlines] == ["ok", "wrong"]


# -- ids --------------------------------------------------------------------------------------------------------------


def absolute(ids: list[str]) -> list[str]:
    """The ids as an editor gives them to pytest: the absolute path of the file, and the id of the test."""
    return [f"{SUITE}::{test_id}" for test_id in ids]


@pytest.mark.nightly
def test_an_editor_can_run_every_id(new_project: NewProject) -> None:
    """Each collected test can be named by absolute path and id, also one with a define or in a user's own file."""
    project = new_project("ids")
    project.python_variant("right")
    project.cuda_variant("zero")
    options = ("--fa-define=BLOCK=64,128", "--ncu", "--fa-sanitize=memcheck")
    ids = project.ids(*options)
    assert [test_id for test_id in ids if "zero@BLOCK=128" in test_id]
    run = project.run("--collect-only", "-q", f"--rootdir={project.folder}", *options, *absolute(ids))
    assert (run.ret, run.ids) == (0, ids), run.text
    names = "test_build, test_correct, test_property, test_speed"
    project.write("tests/test_kernels.py", f"from pytest_fa.suite.test_attention import {names}  # noqa: F401\n")
    shown = [line for line in project.run_here("--collect-only", "-q", "tests").outlines if "::" in line]
    assert [line for line in shown if line.startswith("tests/test_kernels.py::test_correct[right-")]
    again = [line for line in project.run_here("--collect-only", "-q", *shown).outlines if "::" in line]
    assert again == shown


@pytest.mark.nightly
def test_an_editor_can_run_every_id_of_the_repository() -> None:
    """In the repository each collected test can be named by its own id, which is a path below the root."""

    def collect(*ids: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *ids]
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return [line for line in run.stdout.splitlines() if "::" in line]

    ids = [test_id for test_id in collect() if "reference" in test_id or "ws_p2" in test_id]
    assert len(ids) > 20
    assert [f"pytest_fa/suite/{test_id.rpartition('/')[2]}" for test_id in ids] == ids
    assert collect(f"--rootdir={REPOSITORY}", *ids) == ids
