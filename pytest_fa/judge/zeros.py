"""Explain zeros in an output: never written, flushed subnormal numbers, or rows whose exp underflows."""

from __future__ import annotations

import torch

from pytest_fa.attention.dtypes import FORMATS
from pytest_fa.attention.scores import Computes
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.error_location import location_text
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.row_scores import LARGEST_WORDS, rows_far_below
from pytest_fa.judge.truth import Truth

NAMES = {getattr(torch, each.torch_name): name for name, each in FORMATS.items()}


def explain_zeros(out: torch.Tensor, truth: Truth, policy: str, inputs: Inputs, computes: Computes) -> str:
    """Why an output has zeros, if it is right but for them; empty otherwise."""
    right = truth.out.to(out.dtype)
    missing = (out == 0) & (right != 0)
    if not bool(missing.any()) or not check_output(torch.where(missing, right, out), truth, policy).passed:
        return ""
    whole = not bool(out.any())
    where = "all zeros" if whole else f"0 in {location_text(missing, computes)}"
    smallest = torch.finfo(out.dtype).smallest_normal
    name = NAMES.get(out.dtype, str(out.dtype))
    flushed = f"subnormal {name} numbers, below {smallest:.2g}, are flushed to zero"
    if torch.equal(missing, (right != 0) & (right.abs() < smallest)):
        return f"the output is 0 where the right value is subnormal: {flushed}"
    if whole and float(inputs.v.abs().max()) < smallest:
        return f"the output is all zeros, and so small is all of V: {flushed}"
    if computes == "attention" and (rows := rows_far_below(missing.any(-1), inputs)):
        return f"the output is 0 {rows}: {LARGEST_WORDS}"
    if whole:
        return "the output is all zeros: the kernel writes zeros, or the result is never written to the output"
    return f"the output is {where}: never written there, or a zero accumulator is written"
