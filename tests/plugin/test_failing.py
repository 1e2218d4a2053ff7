"""Kernels that are wrong, crash or refuse a case: each fails with its own message, and the others run."""

from __future__ import annotations

import re
import shlex

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.factories import PYTHON_SOURCE
from tests.projects import (
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
FAILING = [name for name in SOURCES if name != "good"]


@pytest.fixture(scope="module")
def failing(new_project: NewProject) -> Project:
    """A correct variant and variants that fail in different ways, in a folder that is not `kernels`."""
    project = new_project("failing")
    for name, source in SOURCES.items():
        project.python_variant(name, source, root="variants")
    return project


@pytest.fixture(scope="module")
def run(failing: Project) -> Run:
    """A run of all variants on one case and on a case that they refuse; the wrong variant is also timed."""
    return failing.suite(
        "--fa-kernels=variants", f"--fa-case={CASE},{REFUSED_CASE}", "-k", f"correct or (speed and wrong and {SHAPE})"
    )


@pytest.fixture(scope="module")
def wrong(run: Run) -> list[str]:
    """The lines of the failure of the wrong variant."""
    return run.failure(f"test_correct[wrong-{CASE}]")


def test_one_failure_each(run: Run) -> None:
    """Each bad variant fails its own test, the correct variant passes, and the refused case is skipped for all."""
    assert run.outcomes == {
        **{f"test_correct[{name}-{CASE}]": "failed" for name in FAILING},
        f"test_correct[good-{CASE}]": "passed",
        **{f"test_correct[{name}-{REFUSED_CASE}]": "skipped" for name in SOURCES},
        f"test_speed[wrong-{SHAPE}]": "skipped",
    }


def test_wrong_result_begins_with_the_verdict(wrong: list[str]) -> None:
    """The first line names the broken bound with its value, the allowed value and the likely cause."""
    pattern = r"wrong: max error [\d.]+e[+-]\d\d, allowed [\d.]+e[+-]\d\d: .+"
    assert re.fullmatch(pattern, wrong[0])


@pytest.mark.parametrize(
    ("bound", "verdict"),
    [("finite", "holds"), ("max", "BROKEN"), ("rms", "BROKEN"), ("row rms", "BROKEN"), ("gain", "BROKEN")],
)
def test_wrong_result_shows_every_bound(wrong: list[str], bound: str, verdict: str) -> None:
    """Every bound of the policy has a line with its value, the allowed value and the verdict."""
    (line,) = [each for each in wrong if each.startswith(f"    {bound}: ")]
    assert re.fullmatch(rf"    {bound}: [\d.e+-]+, allowed [\d.e+-]+(, \d+% of the limit)?: {verdict}", line)


def test_wrong_result_shows_the_worst_place(wrong: list[str]) -> None:
    """The worst element is given by batch, head, query and dim, with its value and the true value."""
    (line,) = [each for each in wrong if each.startswith("  worst: ")]
    assert re.fullmatch(r"  worst: batch 0, head [01], query \d+, dim \d+: got [-\d.]+, want [-\d.]+", line)


def test_wrong_result_counts_bad_elements(wrong: list[str]) -> None:
    """The bad elements, and the NaN and Inf among them, are counted."""
    (line,) = [each for each in wrong if each.startswith("  elements: ")]
    assert re.fullmatch(r"  elements: \d+ of 8192 bad, 0 NaN or Inf", line)


def test_a_nan_is_located(run: Run) -> None:
    """A single NaN fails the case, is counted, and is both the first bad and the worst element."""
    lines = run.failure(f"test_correct[nan-{CASE}]")
    (worst,) = [line for line in lines if line.startswith("  worst")]
    assert [line for line in lines if line.startswith(("  elements", "  first bad", "  worst"))] == [
        "  elements: 1 of 8192 bad, 1 NaN or Inf",
        "  first bad: batch 0, head 1, query 5, dim 2",
        worst,
    ]
    assert worst.startswith("  worst: batch 0, head 1, query 5, dim 2: got not finite, want ")


@pytest.mark.parametrize(
    "name",
    [
        "refuses",
        "raises",
        "no_module",
        "crash",
    ],
)
def test_failure_begins_with_its_cause(run: Run, name: str, snapshot: SnapshotAssertion) -> None:
    """The first line of a failure names its cause."""
    assert snapshot == run.failure(f"test_correct[{name}-{CASE}]")[0]


def test_crash_shows_the_last_output(failing: Project, run: Run) -> None:
    """The failure of a crash has a section with what the process printed before it, and so has its record."""
    assert run.failure(f"test_correct[crash-{CASE}]")[3:] == []
    start = next(index for index, line in enumerate(run.outlines) if "Captured stdout and stderr of the worker" in line)
    (record,) = [each for each in failing.records if each.variant == "crash"]
    assert (run.outlines[start + 1], record.output) == ("a last word", "a last word\n")


def test_crash_reaches_no_later_stage(failing: Project, run: Run) -> None:
    """The record of a crash shows the stage that failed, and that no later stage was reached."""
    (record,) = [each for each in failing.records if each.variant == "crash"]
    assert run.outcomes[f"test_correct[{record.id}]"] == "failed"
    stages = [(stage.name, stage.state) for stage in record.stages]
    later = [(name, "not reached") for name in ("sanity", "correct", "speed")]
    assert stages == [("build", "ok"), ("launch", "failed"), *later]


def test_refused_case_says_why(run: Run) -> None:
    """A case that the manifest does not support is skipped; the reason has the field, its value and those allowed."""
    name = f"test_correct[good-{REFUSED_CASE}]"
    assert run.outcomes[name] == "skipped"
    assert run.reasons[name].endswith(
        "good does not support b1h2s64d64-bf16: dtype is bf16, supports fp16 (extend supports.dtype if the kernel can)"
    )


@pytest.fixture(scope="module")
def timed_alone(failing: Project, run: Run) -> Run:
    """A later run of only the timing of the wrong variant."""
    assert run.outcomes[f"test_speed[wrong-{SHAPE}]"] == "skipped"
    return failing.suite("--fa-kernels=variants", f"--fa-case={CASE}", "-k", "speed and wrong")


def test_a_wrong_result_is_told_once(run: Run) -> None:
    """After a failed test_correct, test_speed of the same case is skipped with one line that names that test."""
    reason = run.reasons[f"test_speed[wrong-{SHAPE}]"]
    assert reason.endswith(f"not timed: test_correct[wrong-{CASE}] failed")


def test_wrong_result_is_not_timed(failing: Project, timed_alone: Run) -> None:
    """test_speed alone judges a wrong variant, gives it no time, and its record does not reach stage `speed`."""
    (record,) = [each for each in failing.records if each.kind == "speed"]
    assert timed_alone.outcomes[f"test_speed[{record.variant}-{SHAPE}]"] == "failed"
    assert (record.speed, record.stages[-1].name, record.stages[-1].state) == (None, "speed", "not reached")


def test_wrong_result_emits_no_warning(timed_alone: Run) -> None:
    """A test_speed that fails before it has samples does not warn about an unused benchmark fixture."""
    assert "PytestBenchmarkWarning" not in timed_alone.text


def rerun_arguments(result: Run, test: str) -> list[str]:
    """The arguments of the rerun command of a failure."""
    (line,) = [each for each in result.failure(test) if each.startswith("  rerun: ")]
    return shlex.split(line.removeprefix("  rerun: pytest "))


def test_rerun_command_runs_that_test_only(failing: Project, run: Run, wrong: list[str]) -> None:
    """The rerun command runs only the failed test, with the same verdict."""
    again = failing.run(*rerun_arguments(run, f"test_correct[wrong-{CASE}]"))
    assert again.outcomes == {f"test_correct[wrong-{CASE}]": "failed"}
    assert [line for line in again.failure(f"test_correct[wrong-{CASE}]") if "repeats:" not in line] == [
        line
        for line in wrong
        if "repeats:" not in line  # the number of repeats depends on the speed of the machine
    ]


def test_rerun_command_of_a_timing(failing: Project, timed_alone: Run) -> None:
    """The rerun command of a failed timing selects that test and the timings of its companions."""
    ids = failing.run(*rerun_arguments(timed_alone, f"test_speed[wrong-{SHAPE}]"), "--collect-only", "-q").ids
    assert ids == [f"test_speed[{name}-{SHAPE}]" for name in ("wrong", *COMPANIONS)]
