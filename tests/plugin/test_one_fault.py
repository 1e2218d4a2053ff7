"""A test is skipped for another's fault only if that other test has really failed: a broken kernel never ends green."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.projects import CASE, ONE_CASE, SHAPE, WRONG_SOURCE, NewProject, Project

# Runs every test a second time if it fails, as plugins for flaky tests do; only the second outcome counts.
REPEAT = """\
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""

# The output and the logarithm of each row's sum, as many attention functions return them.
TUPLE_SOURCE = """\
import torch


def forward(q, k, v, *, scale):
    scores = q.float() @ k.float().transpose(2, 3) * scale
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype), torch.logsumexp(scores, -1)
"""

TUPLE_MANIFEST = """\
entry: {target: "entry:forward", call: CALL}
supports: {device: [cpu], dtype: [fp16, bf16]}
"""

OWN = """\
import pytest


@pytest.mark.xfail(reason="known")
def test_known(fa_variant, fa_case, fa_run):
    fa_run.correct(fa_variant, fa_case)


def test_expected(fa_variant, fa_case, fa_run):
    with pytest.raises(pytest.fail.Exception):
        fa_run.correct(fa_variant, fa_case)
"""


@pytest.fixture(scope="module")
def lab(new_project: NewProject) -> Project:
    """A variant that cannot be imported, and one that is wrong, and the user's own tests that expect this."""
    project = new_project("one_fault")
    project.python_variant("broken", "import nowhere\n")
    project.python_variant("wrong", WRONG_SOURCE)
    project.write("own/test_own.py", OWN)
    return project


def test_a_repeated_test_still_fails(new_project: NewProject) -> None:
    """If a plugin runs a failed test again, the test fails again with its own fault, and is not skipped."""
    project = new_project("repeated")
    project.python_variant("broken", "import nowhere\n")
    project.write("conftest.py", REPEAT)
    run = project.suite(ONE_CASE, "--fa-variant=broken", "-k", "broken and (test_correct or test_speed)")
    assert (run.ret, run.outcomes) == (
        1,
        {f"test_correct[broken-{CASE}]": "failed", f"test_speed[broken-{SHAPE}]": "skipped"},
    )


@pytest.mark.parametrize(
    "call",
    [
        "{keywords: {scale: scale}}",
        "{keywords: {scale: scale}, returns: 2}",
    ],
)
def test_a_function_that_returns_no_output_fails_once(project: Project, call: str, snapshot: SnapshotAssertion) -> None:
    """A function that returns a tuple fails one test with the line to write; every other test names that test."""
    project.python_variant("pair", TUPLE_SOURCE, TUPLE_MANIFEST.replace("CALL", call))
    run = project.suite("--fa-variant=pair", "--fa-suite=smoke", "-k", "pair")
    failed = [name for name, outcome in run.outcomes.items() if outcome == "failed"]
    skipped = [name for name, outcome in run.outcomes.items() if outcome == "skipped"]
    assert (run.ret, len(failed), len(failed) + len(skipped)) == (1, 1, len(run.outcomes))
    assert snapshot == run.failure(failed[0])[0]
    reasons = {run.reasons[name].rpartition("Skipped: ")[2] for name in skipped}
    assert f"pair cannot be run (see {failed[0]})" in reasons
    assert [reason for reason in reasons if "entry.call" in reason] == []


@pytest.mark.nightly
def test_a_failure_that_is_allowed_reports_nothing(lab: Project) -> None:
    """After the user's own tests, which expect the faults, the shipped tests still fail with them."""
    run = lab.run("own", "--pyargs", "pytest_fa.suite", ONE_CASE, "-k", "known or expected or test_correct")
    outcomes = {name: outcome for name, outcome in run.outcomes.items() if name.startswith("test_")}
    assert run.ret == 1
    assert outcomes[f"test_correct[broken-{CASE}]"] == "failed"
    assert outcomes[f"test_correct[wrong-{CASE}]"] == "failed"
    assert outcomes[f"test_expected[broken-{CASE}]"] == "passed"


def test_a_gate_does_not_repeat_a_wrong_result(lab: Project) -> None:
    """A variant that `test_correct` has rejected is not gated; one failure says why."""
    run = lab.suite(
        ONE_CASE, "--fa-variant=wrong", "--fa-gate=2", "--fa-gate-baseline=sdpa_math", "-k", "correct or gate"
    )
    assert (run.ret, run.outcomes["test_gate[wrong]"]) == (1, "skipped")
    assert run.reasons["test_gate[wrong]"].endswith(f"not gated: test_correct[wrong-{CASE}] failed")


def test_a_fault_that_no_test_reports_fails_the_run(new_project: NewProject) -> None:
    """If tests were skipped for a fault and none has failed with it, the run fails and says so."""
    project = new_project("unreported")
    project.cuda_variant("uncompiled", "no C++\n")
    hook = "import pytest\n\n\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
    project.write("conftest.py", hook + "        if 'test_build[' in item.name:\n            item.add_marker('skip')\n")
    run = project.suite(ONE_CASE, "--fa-variant=uncompiled", "-k", "test_build or test_correct")
    assert run.outcomes == {"test_build[uncompiled]": "skipped", f"test_correct[uncompiled-{CASE}]": "skipped"}
    assert run.ret == 1
    assert "fa: tests were skipped because of a fault, but no test failed with it" in run.all_lines
