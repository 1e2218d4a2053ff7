"""What the judge loads before its first job, or while its first variant is loaded."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.judge import warm_up
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.judge.warm_up import USUAL_CASE, judge_tiny_case, warm_up_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CASES = (
    ("b2h4s512d64-fp16-kv2-bshd-seed0", "same_precision"),
    ("b1h8s512d128-bf16-causal_br-sk700-seed0", "same_precision"),
    ("b1h8s512d64-fp32-causal-seed0", "same_precision"),
    ("b1h8s512d64-fp16-seed0", "absolute"),
    ("b1h8s512d64-fp16-scores-seed0", "same_precision"),
    ("b1h8s512d64-e4m3-out_bf16-outlier-seed0", "fp8"),
)


@pytest.mark.parametrize(("case", "policy"), CASES)
def test_a_tiny_case_of_each_kind_is_judged(case: str, policy: str) -> None:
    """The output of NaN is rejected, and so is the log-sum-exp if there is one: every step of a judgement has run."""
    parsed = parse_case(case)
    rejected = [bound.name for bound in judge_tiny_case(parsed, policy, CPU).bounds if not bound.holds]
    assert "finite" in rejected
    assert ("lse" in rejected) is (parsed.computes == "attention")


def test_it_happens_once_and_on_a_gpu_only() -> None:
    """The judge's store remembers it.  The store of a process in which variants run needs none."""
    truths = TruthStore()
    assert warm_up_of(truths, USUAL_CASE, "same_precision", CPU) is None
    assert warm_up_of(truths, USUAL_CASE, "same_precision", GPU) is not None
    assert warm_up_of(truths, USUAL_CASE, "same_precision", GPU) is None
    assert warm_up_of(TruthStore(0), USUAL_CASE, "same_precision", GPU) is None


def test_a_failure_is_left_to_the_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, such as one of a GPU without free memory, does not end the job."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(warm_up, "judge_tiny_case", fail)
    meanwhile = warm_up_of(TruthStore(), USUAL_CASE, "same_precision", GPU)
    assert meanwhile is not None
    meanwhile()
