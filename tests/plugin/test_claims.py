"""A kernel that is wrong only where its manifest claims more than the suite tests is caught by a plain run."""

from __future__ import annotations

import shlex

import pytest

from tests.projects import NewProject, Project, Run
from tests.tiers import nightly_after

# A right kernel, and one for each claim that is wrong only there; their first dtype, head_dim and mask are right.
SOURCE = """\
import torch


def attention(q, k, v, scale, causal):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q.float() @ k.float().transpose(2, 3) * scale
    shift = {"none": k.shape[2], "top_left": 0, "bottom_right": k.shape[2] - q.shape[2]}[causal]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + shift)
    scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v.float()).to(q.dtype)


def right(q, k, v, *, scale, causal="none", out=None):
    return attention(q, k, v, scale, causal)


def wrong_in_bf16(q, k, v, *, scale, causal="none", out=None):
    return attention(q, k, v, scale * (1.05 if q.dtype == torch.bfloat16 else 1.0), causal)


def wrong_at_128(q, k, v, *, scale, causal="none", out=None):
    return attention(q, k, v, 0.125, causal)


def wrong_mask(q, k, v, *, scale, causal="none", out=None):
    return attention(q, k, v, scale, "top_left" if causal == "bottom_right" else causal)


def wrong_lse(q, k, v, *, scale, causal="none", out=None, lse=None):
    scores = q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(2, 3) * scale
    if causal == "bottom_right":
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, float("-inf"))
    return attention(q, k, v, scale, causal), torch.logsumexp(scores, -1) / torch.tensor(2.0).log()


def wrong_groups(q, k, v, *, scale, causal="none", out=None):
    group = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), scale, causal)
"""
FOLDER = """\
entry: {target: "entry:right"}
supports:
  dtype: [fp16, bf16]
  head_dim: [64, 128]
  causal: [none, bottom_right]
  device: [cpu]
  grouped_heads: true
variants:
"""
WRONG = {
    "wrong_in_bf16": "-bf16",
    "wrong_at_128": "d128-",
    "wrong_mask": "-causal_br",
    "wrong_groups": "-kv2",
    "wrong_lse": "-",  # in all cases
}
ONLY_CLAIMS = ("-k", "test_correct and (b2h4s or b2h6s)", "--fa-soak=2")


@pytest.fixture(scope="module")
def claims(new_project: NewProject) -> Project:
    """A project with a right kernel and the wrong ones."""
    project = new_project("claims")
    members = "".join(f'  {name}: {{target: "entry:{name}"}}\n' for name in ("right", *WRONG))
    members = members.replace('wrong_lse"}', 'wrong_lse", returns: [out, lse]}')
    project.python_variant("kernels_with_claims", SOURCE, FOLDER + members)
    return project


@pytest.fixture(scope="module")
def run(claims: Project) -> Run:
    """The run of all of them; the cases of the suite itself are deselected, to save time."""
    return claims.run(f"--fa-variant=right,{','.join(WRONG)}", *ONLY_CLAIMS)


@pytest.mark.parametrize(("name", "part"), nightly_after(1, WRONG.items()))
def test_a_kernel_that_is_wrong_only_in_one_claim(run: Run, name: str, part: str) -> None:
    """Exactly the cases with that claim fail: bf16, D = 128, bottom-right masks, grouped heads, the log-sum-exp."""
    outcomes = {test: outcome for test, outcome in run.outcomes.items() if test.startswith(f"test_correct[{name}-")}
    failed = {test for test, outcome in outcomes.items() if outcome == "failed"}
    assert failed == {test for test in outcomes if part in test}
    assert 0 < len(failed) <= len(outcomes)


def test_a_log_sum_exp_to_base_2(claims: Project, run: Run) -> None:
    """A right output with a wrong log-sum-exp is caught by `lse` alone, and the first line says what it is."""
    failed = [record for record in claims.records if record.variant == "wrong_lse"]
    assert {record.caught_by for record in failed} == {("lse",)}
    assert "the log-sum-exp is in base 2: if that is meant, declare `conventions: {lse: base2}`" in run.text


def test_a_right_kernel_and_the_lines_below_the_table(run: Run) -> None:
    """A right kernel has no row for these cases; their number is below the table, with what was not judged."""
    assert {outcome for test, outcome in run.outcomes.items() if "[right-" in test} == {"passed"}
    counted = len(run.outcomes)
    right = sum(outcome == "passed" for outcome in run.outcomes.values())
    assert (
        f"claims: {right} of {counted} other lengths, dtypes, head_dims, masks, layouts and groupings are correct"
        in run.text
    )
    assert not any(line.split()[:1] == ["right"] for line in run.outlines)
    assert "not judged" not in run.text


def test_the_printed_command_repeats_the_failure(claims: Project, run: Run) -> None:
    """The rerun command of a failed claim fails in the same test; the rest of the claims is named as not judged."""
    failed = next(record for record in claims.records if record.variant == "wrong_mask" and record.outcome == "wrong")
    words = shlex.split(failed.rerun_command)
    again = claims.run(*words[1:])
    assert run.ret == again.ret == 1
    assert again.outcomes[f"test_correct[{failed.id}]"] == "failed"
    assert ": not judged, --fa-case left it out" in again.text
