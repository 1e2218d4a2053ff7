"""The words of a variant's author: printed text, tracebacks and errors of syntax, where pytest's users look."""

from __future__ import annotations

import re

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import CASE, SHAPE, NewProject, Project, Run

SECTION = "Captured stdout and stderr of the worker"
OTHER_CASE = f"{SHAPE}-seed1"
CASES = f"--fa-case={CASE},{OTHER_CASE}"


def first_running(lines: str) -> str:
    """A correct entry that first runs these lines."""
    return PYTHON_SOURCE.replace("    scores =", f"    {lines}\n    scores =", 1)


RAISES = "import torch\n\n\ndef forward(q, k, v, **options):\n    return torch.nn.functional.softmax(q, dim=7)\n"
SYNTAX = "import torch\n\n\ndef forward(q, k:\n    return q\n"
SIGNATURE = "def forward(q, k, v, dropout):\n    return q\n"
WRONG_AND_PRINTS = first_running("print('1 passed in 0.01s'); scale *= 1.5")


@pytest.fixture(scope="module")
def words(new_project: NewProject) -> Project:
    """Variants that print, raise, or cannot be loaded."""
    project = new_project("own_words")
    project.python_variant("prints", first_running("print('a word', q.shape[1])"))
    project.python_variant("wrong", WRONG_AND_PRINTS)
    project.python_variant("raises", RAISES)
    project.python_variant("syntax", SYNTAX)
    project.python_variant("signature", SIGNATURE)
    project.python_variant("misspelt", manifest=PYTHON_MANIFEST.replace("entry:forward", "entry:forwrad"))
    return project


@pytest.fixture(scope="module")
def run(words: Project) -> Run:
    """A run of every variant on two cases, with timings, in a terminal of 80 columns."""
    return words.suite(CASES, "-rA", env={"COLUMNS": "80"})


def section(run: Run, test: str) -> list[str]:
    """The lines of the worker's section below the head of a test."""
    lines = run.outlines[next(index for index, line in enumerate(run.outlines) if line.strip("_ ") == test) + 1 :]
    end = next(
        index for index, line in enumerate(lines) if re.match(r"[_=]{2,} .* [_=]{2,}$|-+ generated xml file: ", line)
    )
    heads = [index for index, line in enumerate(lines[:end]) if line.strip("- ") == SECTION]
    return lines[heads[0] + 1 : end] if heads else []


@pytest.mark.nightly
def test_print_of_a_failed_test_is_a_section(run: Run) -> None:
    """What a failing entry printed is a section below its failure, and nothing of it is above that."""
    test = f"test_correct[wrong-{CASE}]"
    assert set(section(run, test)) == {"1 passed in 0.01s"}
    assert [line for line in run.failure(test) if "1 passed" in line] == []


def test_print_of_a_passed_test_is_shown_on_request(words: Project, run: Run) -> None:
    """With -rA, the section of a passed test is shown; without, it is not."""
    assert set(section(run, f"test_correct[prints-{CASE}]")) == {"a word 2"}
    quiet = words.suite(f"--fa-case={CASE}", "--fa-variant=prints", "-k", "test_correct")
    assert (quiet.ret, "a word" in quiet.text) == (pytest.ExitCode.OK, False)


def test_live_output(words: Project) -> None:
    """With -s, each line appears while the test runs, marked as the worker's, and is not repeated as a section."""
    run = words.suite("-s", f"--fa-case={CASE}", "--fa-variant=wrong", "-k", "test_correct")
    printed = [line for line in run.outlines if "1 passed" in line]
    assert set(printed) == {"[worker] 1 passed in 0.01s"}
    assert SECTION not in run.text
    assert run.outlines.index(printed[0]) < next(n for n, line in enumerate(run.outlines) if " FAILURES " in line)


@pytest.mark.nightly
def test_sections_arrive_under_xdist(words: Project) -> None:
    """With pytest-xdist, also with -s, the controller shows what the workers of the workers printed."""
    pytest.importorskip("xdist")
    run = words.suite("-n1", "-s", f"--fa-case={CASE}", "--fa-variant=wrong", "-k", "test_correct")
    assert set(section(run, f"test_correct[wrong-{CASE}]")) == {"1 passed in 0.01s"}


def test_the_record_of_a_failure_has_the_output(words: Project, run: Run) -> None:
    """The record of a failed test has the end of what was printed; that of a passed test has nothing."""
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    outputs = {record.id: set(record.output.splitlines()) for record in words.records if record.kind == "correct"}
    assert (outputs[f"wrong-{CASE}"], outputs[f"prints-{CASE}"]) == ({"1 passed in 0.01s"}, set())


def test_traceback_ends_in_the_users_frame(run: Run, snapshot: SnapshotAssertion) -> None:
    """An exception has a traceback with the user's frames only, and the stages follow it."""
    lines = run.failure(f"test_correct[raises-{CASE}]")
    assert lines[0].endswith("(entry.py:5)")
    assert snapshot == lines[1:4]
    assert [line for line in lines if line.startswith("  File")] == [lines[2]]


def test_syntax_error_has_a_caret(run: Run, snapshot: SnapshotAssertion) -> None:
    """An error of syntax shows file, line and caret."""
    assert snapshot == run.failure(f"test_correct[syntax-{CASE}]")[:6]


@pytest.mark.parametrize(
    "name",
    [
        "misspelt",
        "signature",
    ],
)
def test_one_fault_is_one_failure(run: Run, name: str, snapshot: SnapshotAssertion) -> None:
    """A fault of the entry fails the first test of the variant; the others are skipped and name that test."""
    tests = {test: outcome for test, outcome in run.outcomes.items() if f"[{name}-" in test}
    first = f"test_correct[{name}-{CASE}]"
    assert tests == {
        first: "failed",
        f"test_correct[{name}-{OTHER_CASE}]": "skipped",
        f"test_speed[{name}-{SHAPE}]": "skipped",
    }
    assert snapshot == run.failure(first)[0]
    assert run.reasons[f"test_correct[{name}-{OTHER_CASE}]"].endswith(f"{name} cannot be run (see {first})")


def test_a_wrong_result_is_told_once_per_case(run: Run) -> None:
    """Each case of a wrong variant fails in test_correct, and test_speed says in one line that it failed there."""
    tests = {test: outcome for test, outcome in run.outcomes.items() if "[wrong-" in test}
    assert sorted(tests.values()) == ["failed", "failed", "skipped"]
    reason = run.reasons[f"test_speed[wrong-{SHAPE}]"]
    assert reason.endswith(f"not timed: test_correct[wrong-{CASE}] failed")


def test_summary_lines_begin_with_the_cause(run: Run) -> None:
    """In pytest's summary at 80 columns, what is left of a line after the test's id is the begin of the cause."""
    lines = [line for line in run.outlines if line.startswith("FAILED ") and " - " in line]
    causes = dict(line.removeprefix("FAILED ").split(" - ", 1) for line in lines)
    shown = {test.partition("::")[2]: text.removesuffix("...") for test, text in causes.items()}
    assert all(len(line) <= 80 for line in lines)
    assert shown[f"test_correct[wrong-{CASE}]"].startswith("wrong")
    for name in ("raises", "syntax"):
        test = f"test_correct[{name}-{CASE}]"
        assert shown[test] != ""
        assert run.failure(test)[0].startswith(shown[test])
