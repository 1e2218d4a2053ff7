"""What the judge loads while its first variant is loaded."""

from __future__ import annotations

import msgspec
import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.judge import warm_up
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.judge.warm_up import judge_tiny_case, warm_up_of
from tests.factories import variant

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CASE = parse_case("b2h4s512d64-fp16-kv2-bshd-seed0")
CASES = (
    ("b2h4s512d64-fp16-kv2-bshd-seed0", "same_precision"),
    ("b1h8s512d128-bf16-causal_br-sk700-seed0", "same_precision"),
    ("b1h8s512d64-fp32-causal-seed0", "same_precision"),
    ("b1h8s512d64-fp16-seed0", "absolute"),
    ("b1h8s512d64-e4m3-out_bf16-outlier-seed0", "fp8"),
)


@pytest.mark.parametrize(("case", "policy"), CASES)
@pytest.mark.parametrize("returns", [("out",), ("out", "lse")])
def test_a_tiny_case_of_each_kind_is_judged(case: str, policy: str, returns: tuple[str, ...]) -> None:
    """The output of NaN is rejected, so every step of a judgement has run."""
    check = judge_tiny_case(msgspec.structs.replace(variant("mine"), returns=returns), parse_case(case), policy, CPU)
    assert not check.passed
    assert check.tightest.name in ("finite", "lse")


def test_it_happens_once_and_on_a_gpu_only() -> None:
    """The judge's store remembers it.  The store of a process in which variants run needs none."""
    truths = TruthStore()
    assert warm_up_of(truths, variant("mine"), CASE, "same_precision", CPU) is None
    assert warm_up_of(truths, variant("mine"), CASE, "same_precision", GPU) is not None
    assert warm_up_of(truths, variant("mine"), CASE, "same_precision", GPU) is None
    assert warm_up_of(TruthStore(0), variant("mine"), CASE, "same_precision", GPU) is None


def test_a_failure_is_left_to_the_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, such as one of a GPU without free memory, does not end the job."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(warm_up, "judge_tiny_case", fail)
    meanwhile = warm_up_of(TruthStore(), variant("mine"), CASE, "same_precision", GPU)
    assert meanwhile is not None
    meanwhile()
