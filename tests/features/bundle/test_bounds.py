"""A record's check must have the bounds that its policy has for the output of its case, or for all gradients."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch")

import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.features.bundle.check_rules import wrong_bounds
from pytest_fa.gpu.inputs import Output, make_inputs, poisoned_outputs
from pytest_fa.judge.forward_results import with_results
from pytest_fa.judge.gradients import truth_of_gradients
from pytest_fa.judge.output_check import check_outputs
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.records.checks import Check


def check_of(text: str) -> Check:
    """The check of an output that is as the same-precision reference, with untouched padding."""
    case = parse_case(text)
    inputs = with_results(make_inputs(case, torch.device("cpu")))
    truths = truth_of_gradients(inputs) if case.computes == "gradients" else {"out": make_truth(inputs)}
    first, *others = truths
    outputs = poisoned_outputs(inputs, case.computes, others)
    written = Output(
        _written(outputs.out, truths[first]),
        {name: _written(each, truths[name]) for name, each in outputs.more.items()},
    )
    return check_outputs(written, truths[first], {name: truths[name] for name in others}, "same_precision")


def _written(poisoned: torch.Tensor, truth: Truth) -> torch.Tensor:
    rows = torch.zeros_like(poisoned, dtype=torch.bool)
    if truth.padding is not None:
        rows = truth.padding.rows[..., None].expand_as(poisoned)
    return torch.where(rows, poisoned, truth.same_precision.to(poisoned.dtype))


@pytest.mark.parametrize(
    "text",
    [
        "b1h2s64d64-fp16-seed0",
        "b4h4s70d64-fp16-var2-seed0",
        "b4h4s70d64-fp16-var1-seed0",
        "b1h2s64d64-bf16-causal-bwd-seed0",
        "b4h4s70d64-fp16-kv2-var1-dv32-bwd-seed0",
        "b4h4s70d64-fp16-kv2-var2-bwd-dlse-seed0",
        "b1h2s9d64-fp16-sk0-bwd-seed0",
        "b2h3s40d64-fp16-biashq-sink-bwd-seed0",
    ],
)
def test_bounds_are_those_of_the_case(text: str) -> None:
    """A check of the case has them; with one less, or of fewer elements, it is told."""
    case, check = parse_case(text), check_of(text)
    assert check.passed, check.complaint
    assert list(wrong_bounds(check, case)) == []
    assert list(wrong_bounds(msgspec.structs.replace(check, bounds=check.bounds[:-1]), case))
    assert list(wrong_bounds(msgspec.structs.replace(check, element_count=check.element_count + 1), case))
