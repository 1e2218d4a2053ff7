"""The markers in a user's own tests: another suite, another tolerance policy, a gate."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.suites import SUITES
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import ONE_CASE, NewProject, Project, Run

# An error of 0.1 %: above the bounds of `same_precision`, below the threshold of `absolute`.
NEAR_SOURCE = PYTHON_SOURCE.replace("    return result if", "    result = result * 1.001\n    return result if")

OWN_TESTS = """\
import pytest


def judge(fa_module, fa_inputs, fa_check):
    q, k, v, scale, causal = fa_inputs
    return fa_check(fa_module(q, k, v, scale=scale, causal=causal)).policy


@pytest.mark.fa_suite("smoke")
def test_other_cases(fa_case):
    assert fa_case.heads == 2


def test_own_policy(fa_module, fa_inputs, fa_check):
    judge(fa_module, fa_inputs, fa_check)


@pytest.mark.fa_tolerance("absolute")
def test_other_policy(fa_module, fa_inputs, fa_check):
    assert judge(fa_module, fa_inputs, fa_check) == "absolute"


@pytest.mark.fa_tolerance("loose")
def test_no_policy(fa_module, fa_inputs, fa_check):
    judge(fa_module, fa_inputs, fa_check)


@pytest.mark.fa_gate(0.5)
def test_gated(fa_variant, fa_run):
    fa_run.gate(fa_variant)


def test_no_ratio(fa_variant, fa_run):
    fa_run.gate(fa_variant)


@pytest.mark.fa_gate("fast")
def test_no_number(fa_variant, fa_run):
    fa_run.gate(fa_variant)
"""


@pytest.fixture(scope="module")
def own(new_project: NewProject) -> Project:
    """A nearly correct variant, and tests with markers."""
    project = new_project("markers")
    project.python_variant("near", NEAR_SOURCE)
    project.write("test_own.py", OWN_TESTS)
    return project


@pytest.fixture(scope="module")
def run(own: Project) -> Run:
    """A run of all tests on one case."""
    return own.run(".", "--fa-variant=near", ONE_CASE, "--strict-markers", "-k", "near or other_cases")


def outcome(run: Run, test: str) -> str:
    """The outcome of a test that has a single item."""
    (single_outcome,) = [each for name, each in run.outcomes.items() if name.startswith(f"{test}[")]
    return single_outcome


def test_every_marker_is_shown(own: Project) -> None:
    """`pytest --markers` lists every marker with its effect."""
    shown = own.run("--markers").text
    for name in ("fa_suite(*names)", "fa_tolerance(policy)", "fa_gate(ratio)"):
        assert f"@pytest.mark.{name}: " in shown


def test_another_suite(run: Run) -> None:
    """A test marked with a suite runs over the cases of that suite, not over those of the run."""
    outcomes = {name: outcome for name, outcome in run.outcomes.items() if name.startswith("test_other_cases[")}
    assert outcomes == {f"test_other_cases[{case.id}]": "passed" for case in SUITES["smoke"]}


def test_another_policy(run: Run) -> None:
    """A test marked with policy `absolute` accepts an output that the default policy rejects."""
    assert [outcome(run, name) for name in ("test_own_policy", "test_other_policy")] == ["failed", "passed"]


@pytest.mark.nightly
def test_the_command_line_overrides_the_marker(own: Project) -> None:
    """`--fa-tolerance` overrides the marker."""
    again = own.run(
        ".", "--fa-variant=near", ONE_CASE, "--fa-tolerance=same_precision", "-k", "near and test_other_policy"
    )
    assert outcome(again, "test_other_policy") == "failed"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("test_no_policy", "fa_tolerance takes one of same_precision, absolute, fp8; it is 'loose'"),
        ("test_no_ratio", "fa_run.gate: there is no ratio; give --fa-gate=0.95, or mark the test with fa_gate(0.95)"),
        ("test_no_number", "fa_gate takes a ratio of 0.01 to 100, such as 0.95; it is 'fast'"),
    ],
)
def test_a_wrong_marker_fails_its_test(run: Run, test: str, message: str) -> None:
    """A wrong marker fails its test with one line that says what is allowed."""
    assert outcome(run, test) == "failed"
    assert message in run.text


def test_a_marked_gate_runs(run: Run) -> None:
    """A test marked with a gate runs it: a kernel that is wrong in the pilot fails with its bounds."""
    assert outcome(run, "test_gated") == "failed"
    assert "\nwrong: " in run.text


def test_an_unknown_suite_ends_the_run(project: Project) -> None:
    """An unknown suite in a marker is a usage error with a suggestion."""
    project.python_variant("near")
    project.write("test_own.py", 'import pytest\n\n\n@pytest.mark.fa_suite("egde")\ndef test_it(fa_case):\n    pass\n')
    run = project.run()
    assert (run.ret, "no suite 'egde'; did you mean 'edge'?" in run.text) != (0, False)


def test_a_marked_suite_is_adapted_despite_named_cases(project: Project) -> None:
    """The cases of a marked suite are adapted to the variant, even if `--fa-case` selects the cases of the run."""
    project.python_variant("mine", manifest=PYTHON_MANIFEST.replace("supports: {", "supports: {head_dim: [128], "))
    project.write(
        "test_own.py",
        'import pytest\n\n\n@pytest.mark.fa_suite("smoke")\ndef test_it(fa_variant, fa_case):\n'
        "    assert fa_case.head_dim == 128\n",
    )
    run = project.run("test_own.py", "--fa-variant=mine", "--fa-case=b1h1s8d128-fp16-seed0")
    assert set(run.outcomes.values()) == {"passed"}
