"""A run on GitHub: annotations, the step summary, and no way for a kernel to give commands to the runner."""

from __future__ import annotations

import importlib.util
import json
import re
from html import unescape
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import CASE, ONE_CASE, WRONG_SOURCE, NewProject, Project, Run

COMMAND = re.compile(r"^\s*::[\w-]+.*?::|##\[", re.MULTILINE)
WORDS = r"\n::set-output name=a::b\n ::add-path::c\n##[error]d</details>"
SAYS = f'    import os\n    print("{WORDS}", flush=True)\n    os.write(2, "{WORDS}".encode())\n'
DIES = PYTHON_SOURCE.replace("    scores =", f"{SAYS}    os._exit(3)\n    scores =", 1)
RAISES = PYTHON_SOURCE.replace("    scores =", f'    raise RuntimeError("::error::{WORDS}")\n    scores =', 1)
HAS_HTML = importlib.util.find_spec("pytest_html") is not None


@pytest.fixture(scope="module")
def project_on_github(new_project: NewProject) -> Project:
    """A right variant, a wrong one, one that dies and one that raises; the last two print workflow commands."""
    project = new_project("github")
    project.ini(has_html=True)
    project.python_variant("right")
    project.python_variant("wrong", WRONG_SOURCE)
    project.python_variant("dies", DIES)
    project.python_variant("raises", RAISES)
    return project


@pytest.fixture(scope="module")
def run(project_on_github: Project) -> Run:
    """A run of all of them on one case, as GitHub would start it."""
    folder = project_on_github.folder
    variables = {
        "CI": "true",
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(folder),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    page = ("--html=page.html", "--self-contained-html") if HAS_HTML else ()
    variants = "--fa-variant=right,wrong,dies,raises"
    return project_on_github.suite(ONE_CASE, variants, "-k", "test_correct", "-rA", *page, env=variables)


def test_each_fault_is_annotated_at_its_source(run: Run) -> None:
    """Each failing variant has one annotation at its source; Python's exception has the line that raised it."""
    commands = [line for line in run.outlines if COMMAND.match(line)]
    places = [re.match(r"::error file=(.*),line=(\d+),title=(\w+)", line) for line in commands]
    line = RAISES[: RAISES.index("raise ")].count("\n") + 1
    assert [match and match.groups() for match in places] == [
        ("kernels/wrong/entry.py", "1", "wrong"),
        ("kernels/dies/entry.py", "1", "dies"),
        ("kernels/raises/entry.py", str(line), "raises"),
    ]


def test_a_kernel_gives_no_commands(run: Run) -> None:
    """No line of a kernel's output, exception or last words is a command for GitHub's runner."""
    others = [line for line in run.all_lines if COMMAND.search(line) and not line.startswith("::error file=kernels/")]
    assert others == []
    assert r"\x3a:set-output name=a::b" in run.text


def test_the_summary_has_the_table_and_the_failures(project_on_github: Project, run: Run) -> None:
    """The step summary has a row for each variant and a folded text for each failure, which stays folded."""
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    text = (project_on_github.folder / "summary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| \S+ \| (\w+) \d/\d \|", text, re.MULTILINE)
    assert rows == [("right", "ok"), ("wrong", "WRONG"), ("dies", "CRASHED"), ("raises", "FAILED")]
    assert (text.count("<details>"), text.count("</details>")) == (3, 3)
    assert COMMAND.findall(text) == []


@pytest.mark.skipif(not HAS_HTML, reason="pytest-html is not installed")
def test_the_html_page_has_table_figures_and_error_map(project_on_github: Project, run: Run) -> None:
    """The page has the table of the run, the figures of each test, and the error map of the wrong output."""
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    page = (project_on_github.folder / "page.html").read_text(encoding="utf-8")
    assert page.count('class="fa-table"') == 1
    match = re.search(r'data-jsonblob="(.*?)"', page)
    assert match is not None
    tests = json.loads(unescape(match[1]))["tests"]
    below = {name.split("[")[1].split("-")[0]: test[0]["extras"][0]["content"] for name, test in tests.items()}
    assert {name: text.split(",")[0] for name, text in below.items()} == {
        "right": "<p>ok",
        "wrong": "<p>wrong",
        "dies": "<p>crashed</p>",
        "raises": "<p>failed</p>",
    }
    assert [name for name, text in below.items() if "fa-error-map" in text] == ["wrong"]


def test_elsewhere_nothing_is_annotated(project_on_github: Project) -> None:
    """Without GITHUB_ACTIONS=true there are no annotations."""
    run = project_on_github.suite(ONE_CASE, "--fa-variant=raises", "-k", "test_correct")
    assert (run.ret, [line for line in run.outlines if line.startswith("::")]) == (1, [])


def test_a_run_in_which_nothing_ran_is_annotated(project: Project, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """If every test was skipped, one annotation gives the reasons; there is no summary without records."""
    project.python_variant("needs_gpu", manifest=PYTHON_MANIFEST.replace("[cpu, cuda]", "[cuda]"))
    variables = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    run = project.suite(f"--fa-case={CASE}", "-k", "test_correct", env=variables)
    (line,) = [line for line in run.outlines if line.startswith("::")]
    assert snapshot == line
    assert not (tmp_path / "summary.md").exists()
