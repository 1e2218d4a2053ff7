"""--fa-tolerance: judging by another tolerance policy than the manifest's."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_MANIFEST
from tests.projects import CASE, ONE_CASE, NewProject, Project


@pytest.fixture(scope="module")
def good(new_project: NewProject) -> Project:
    """A variant whose manifest does not name a tolerance policy."""
    project = new_project("tolerance")
    project.python_variant("good")
    return project


@pytest.mark.parametrize("policy", ["absolute", "fp8"])
def test_policy_is_used(good: Project, policy: str) -> None:
    """The selected policy overrides the manifest's, and the record names it."""
    good.suite(ONE_CASE, "-k", "test_correct", f"--fa-tolerance={policy}")
    assert (record.check.policy if (record := good.records[-1]).check else None) == policy


OWN_TEST = """\
from pytest_fa.judge.output_check import check_output


def test_own(fa_inputs, fa_truth, fa_check):
    out = fa_truth.out.to(fa_inputs.q.dtype)
    assert (fa_check(out).policy, check_output(out, fa_truth, "fp8").passed) == ("fp8", True)
"""


@pytest.mark.nightly
def test_fp8_in_a_users_own_test(new_project: NewProject) -> None:
    """`fa_check` judges by the selected policy, and `fa_truth` has the data that this policy needs."""
    project = new_project("own_tolerance")
    project.write("test_own.py", OWN_TEST)
    run = project.run(f"--fa-case={CASE}", "--fa-tolerance=fp8", "test_own.py")
    assert list(run.outcomes.values()) == ["passed"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--fa-tolerance=mesured"],
            "--fa-tolerance: no 'mesured' (allowed: same_precision, absolute, fp8)",
        ),
        (
            ["--fa-tolerance=absolute", "--fa-suite=smoke"],
            "--fa-tolerance=absolute judges fp16 only; case b1h2s64d64-bf16-seed0 is bf16 (use same_precision)",
        ),
    ],
    ids=["unknown", "not for these cases"],
)
def test_bad_policy_is_a_usage_error(good: Project, arguments: list[str], complaint: str) -> None:
    """A policy that does not exist, or that does not apply to the cases, is a usage error of one line."""
    result = good.collect(*arguments)
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [f"ERROR: {complaint}"])


def test_absolute_refuses_a_variant_for_bf16(project: Project) -> None:
    """Policy `absolute`, which judges fp16 only, is a usage error for a variant that supports only bf16."""
    manifest = PYTHON_MANIFEST.replace("supports: {", "supports: {dtype: [bf16], ")
    project.python_variant("other", manifest=manifest)
    result = project.collect("--fa-variant=other", "--fa-tolerance=absolute")
    complaint = "ERROR: --fa-tolerance=absolute judges fp16 only; other supports only bf16 (use same_precision)"
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [complaint])


def test_two_policies_are_a_usage_error(good: Project) -> None:
    """Two policies at once are a usage error of one line."""
    result = good.collect("--fa-tolerance=measured,absolute")
    assert (result.ret, len(result.all_lines)) == (pytest.ExitCode.USAGE_ERROR, 1)
