"""Kernels that are wrong, crash or refuse: what the run says of each, while the others go on."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.factories import PYTHON_SOURCE
from tests.plugin.conftest import (
    CASE,
    COMPANIONS,
    NAN_SOURCE,
    SHAPE,
    WRONG_SOURCE,
    NewProject,
    Project,
    Run,
)

REFUSED_CASE = "b1h2s64d64-bf16-seed0"
REFUSAL = "from pytest_fa.errors import UnsupportedCase\n\n\ndef forward(*_, **__):\n    raise UnsupportedCase('{}')\n"
CRASH = "import os\n\n\ndef forward(*_, **__):\n    print('a last word', flush=True)\n    os._exit(3)\n"
RAISE = "def forward(*_, **__):\n    raise RuntimeError('no luck')\n"
SOURCES = {
    "crash": CRASH,
    "good": PYTHON_SOURCE,
    "nan": NAN_SOURCE,
    "no_module": "import there_is_no_such_module\n",
    "raises": RAISE,
    "refuses": REFUSAL.format("odd days only"),
    "wrong": WRONG_SOURCE,
}
NO_MODULE = "No module named 'there_is_no_such_module'"
FAILING = [name for name in SOURCES if name != "good"]


@pytest.fixture(scope="module")
def failing(new_project: NewProject) -> Project:
    """A good variant among those that fail in every way, in a folder of another name."""
    project = new_project("failing")
    for name, source in SOURCES.items():
        project.python_variant(name, source, root="house")
    return project


@pytest.fixture(scope="module")
def run(failing: Project) -> Run:
    """All of them on a case, on a case that they refuse, and the wrong one timed."""
    return failing.suite(
        "--fa-kernels=house", f"--fa-case={CASE},{REFUSED_CASE}", "-k", f"correct or (speed and wrong and {SHAPE})"
    )


@pytest.fixture(scope="module")
def wrong(run: Run) -> list[str]:
    """What the terminal says of the wrong result."""
    return run.failure(f"test_correct[wrong-{CASE}]")


def test_one_failure_each(run: Run) -> None:
    """Each bad variant fails its own test, the good one among them passes, and the refused case is skipped for all."""
    assert run.outcomes == {
        **{f"test_correct[{name}-{CASE}]": "failed" for name in FAILING},
        f"test_correct[good-{CASE}]": "passed",
        **{f"test_correct[{name}-{REFUSED_CASE}]": "skipped" for name in SOURCES},
        f"test_speed[wrong-{SHAPE}]": "failed",
    }


def test_wrong_result_begins_with_the_verdict(wrong: list[str]) -> None:
    """The first line names the case and the bound that broke, its value beside what is allowed."""
    pattern = rf"wrong-{CASE}: wrong result: max error is [\d.]+, allowed is [\d.]+"
    assert re.fullmatch(pattern, wrong[0])


@pytest.mark.parametrize(
    ("bound", "verdict"),
    [("finite", "holds"), ("max", "BROKEN"), ("rms", "BROKEN"), ("row rms", "BROKEN"), ("gain", "BROKEN")],
)
def test_wrong_result_shows_every_bound(wrong: list[str], bound: str, verdict: str) -> None:
    """Every bound of the policy has its line: value, allowance, verdict."""
    (line,) = [each for each in wrong if each.startswith(f"    {bound}: ")]
    assert re.fullmatch(rf"    {bound}: [\d.e+-]+, allowed [\d.e+-]+(, \d+% of it used)?: {verdict}", line)


def test_wrong_result_shows_the_worst_place(wrong: list[str]) -> None:
    """The worst element stands there by batch, head, query and dim, with what it is and what it should be."""
    (line,) = [each for each in wrong if each.startswith("  worst: ")]
    assert re.fullmatch(r"  worst: batch 0, head [01], query \d+, dim \d+: got [-\d.]+, want [-\d.]+", line)


def test_wrong_result_counts_bad_elements(wrong: list[str]) -> None:
    """The bad elements and the NaNs among them are counted."""
    (line,) = [each for each in wrong if each.startswith("  elements: ")]
    assert re.fullmatch(r"  elements: \d+ of 8192 bad, 0 NaN or Inf", line)


def test_nan_is_found_where_it_is(run: Run) -> None:
    """A single NaN fails the case, is counted, and is the worst element."""
    lines = run.failure(f"test_correct[nan-{CASE}]")
    (worst,) = [line for line in lines if line.startswith("  worst")]
    assert [line for line in lines if line.startswith(("  elements", "  first bad", "  worst"))] == [
        "  elements: 1 of 8192 bad, 1 NaN or Inf",
        "  first bad: batch 0, head 1, query 5, dim 2",
        worst,
    ]
    assert worst.startswith("  worst: batch 0, head 1, query 5, dim 2: got not finite, want ")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("refuses", f"refuses-{CASE}: refused a case that its manifest supports: odd days only"),
        ("raises", f"raises-{CASE}: failed: RuntimeError: no luck (entry.py:2)"),
        (
            "no_module",
            f"no_module-{CASE}: failed: no_module: entry.target 'entry:forward' cannot be imported: {NO_MODULE}",
        ),
        (
            "crash",
            f"crash-{CASE}: crashed its process: its worker died in stage launch (exit status 3); a new one takes over",
        ),
    ],
)
def test_failure_begins_with_what_happened(run: Run, name: str, line: str) -> None:
    """Whatever a kernel does, the first line says it."""
    assert run.failure(f"test_correct[{name}-{CASE}]")[0] == line


def test_crash_shows_the_last_words(run: Run) -> None:
    """What a process printed before it crashed is in the failure."""
    assert run.failure(f"test_correct[crash-{CASE}]")[1:3] == ["its last words:", "a last word"]


def test_crash_reaches_no_later_stage(failing: Project, run: Run) -> None:
    """A record of a crash says of every stage whether it was reached."""
    (record,) = [each for each in failing.records if each.variant == "crash"]
    assert run.outcomes[f"test_correct[{record.id}]"] == "failed"
    stages = [(stage.name, stage.state) for stage in record.stages]
    later = [(name, "not reached") for name in ("sanity", "correct", "speed")]
    assert stages == [("build", "ok"), ("launch", "failed"), *later]


def test_refused_case_says_why(run: Run) -> None:
    """A case outside of `supports` is skipped with the manifest's field, the value and what is supported."""
    name = f"test_correct[good-{REFUSED_CASE}]"
    assert run.outcomes[name] == "skipped"
    assert run.reasons[name].endswith("good does not support b1h2s64d64-bf16: dtype is bf16, supports fp16")


def test_wrong_result_is_not_timed(failing: Project, run: Run) -> None:
    """A wrong variant gets no time, and its record says that the stage was not reached."""
    (record,) = [each for each in failing.records if each.kind == "speed"]
    assert run.outcomes[f"test_speed[{record.variant}-{SHAPE}]"] == "failed"
    assert (record.speed, record.stages[-1].name, record.stages[-1].state) == (None, "speed", "not reached")


def test_wrong_result_brings_no_warning(run: Run) -> None:
    """A test_speed that fails before it has samples does not warn of an unused benchmark fixture."""
    assert "PytestBenchmarkWarning" not in run.text


def repeat_of(result: Run, test: str) -> list[str]:
    """The arguments of the command that a failure prints."""
    (line,) = [each for each in result.failure(test) if each.startswith("  repeat: ")]
    return shlex.split(line.removeprefix("  repeat: pytest "))


def test_repeat_command_runs_that_one_test(failing: Project, run: Run, wrong: list[str]) -> None:
    """The printed command runs the failed item alone and comes to the same verdict."""
    again = failing.run(*repeat_of(run, f"test_correct[wrong-{CASE}]"))
    assert again.outcomes == {f"test_correct[wrong-{CASE}]": "failed"}
    assert [line for line in again.failure(f"test_correct[wrong-{CASE}]") if "repeats:" not in line] == [
        line
        for line in wrong
        if "repeats:" not in line  # how many there are depends on how fast the machine is
    ]


def test_repeat_command_of_a_timing(failing: Project, run: Run) -> None:
    """The command of a failed timing selects that item, and beside it its companions alone."""
    ids = failing.run(*repeat_of(run, f"test_speed[wrong-{SHAPE}]"), "--collect-only", "-q").ids
    assert ids == [f"test_speed[{each}-{SHAPE}]" for each in ("wrong", *COMPANIONS)]
