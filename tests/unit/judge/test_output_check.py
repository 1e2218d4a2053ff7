"""The verdict on one output: indices, counts and figures, also if some figures are not finite."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import Truth
from pytest_fa.records.checks import Check, Index

SHAPE = (2, 3, 8, 16)  # [batch, heads, seq_q, head_dim]


@pytest.fixture
def truth() -> Truth:
    """Zero-mean values, with the same values rounded to fp16 as same-precision reference."""
    out = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Truth(out, out.half().double(), terms=8, row_size=out.square().mean(-1).sqrt())


def output(truth: Truth, errors: dict[Index, float], layout: str = "bhsd") -> torch.Tensor:
    """The rounded truth with errors added at some indices, stored as [b, h, s, d] or, for `bshd`, as [b, s, h, d]."""
    out = truth.out.half()
    for place, error in errors.items():
        out[place] += error
    return out if layout == "bhsd" else out.transpose(1, 2).contiguous().transpose(1, 2)


def test_right_output(truth: Truth) -> None:
    """The rounded truth passes: no element is bad, and its errors are those of the same-precision reference."""
    check = check_output(output(truth, {}), truth, "same_precision")

    assert (check.policy, check.passed, check.element_count) == ("same_precision", True, 2 * 3 * 8 * 16)
    assert (check.bad_count, check.nonfinite_count, check.first_bad) == (0, 0, None)
    assert (
        check.max_abs_error == check.same_precision_max_error == float((truth.same_precision - truth.out).abs().max())
    )
    assert (
        check.rms_error
        == check.same_precision_rms_error
        == float((truth.same_precision - truth.out).square().mean().sqrt())
    )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_first_and_worst_place(truth: Truth, layout: str) -> None:
    """The first bad element is the first in (batch, head, query, dim) order, the worst has the largest error."""
    errors: dict[Index, float] = {(0, 2, 5, 7): -1.0, (1, 0, 3, 11): 4.0, (1, 2, 7, 15): 2.0}

    check = check_output(output(truth, errors, layout), truth, "same_precision")

    assert (check.first_bad, check.worst, check.bad_count) == ((0, 2, 5, 7), (1, 0, 3, 11), 3)
    assert check.worst_want == float(truth.out[1, 0, 3, 11])
    assert check.worst_got == pytest.approx(float(truth.out[1, 0, 3, 11]) + 4, abs=0.01)
    assert check.max_abs_error == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 2, 7, 15)])
def test_place_of_one_bad_element(truth: Truth, place: Index, layout: str) -> None:
    """A single bad element is the first and the worst, at any index and in both memory layouts."""
    check = check_output(output(truth, {place: 1.0}, layout), truth, "same_precision")

    assert (check.first_bad, check.worst, check.bad_count) == (place, place, 1)


def test_nan_is_worse_than_any_number(truth: Truth) -> None:
    """A NaN is the worst element even beside a large error; maximum and RMS are None, indices and counts are valid."""
    out = output(truth, {(0, 0, 0, 0): 1000.0})
    out[1, 1, 4, 4] = math.nan

    check = check_output(out, truth, "same_precision")

    assert (check.worst, check.first_bad, check.bad_count) == ((1, 1, 4, 4), (0, 0, 0, 0), 2)
    assert (check.nonfinite_count, check.max_abs_error, check.rms_error, check.worst_got) == (1, None, None, None)
    assert check.worst_want == float(truth.out[1, 1, 4, 4])


def test_broken_bound_is_the_tightest(truth: Truth) -> None:
    """`tightest` is the first bound that does not hold."""
    wrong = check_output(output(truth, {(0, 0, 0, 0): 1.0}), truth, "same_precision")

    assert wrong.tightest == next(bound for bound in wrong.bounds if not bound.holds)
    assert wrong.tightest.name == "max"


def test_nearest_bound_is_the_tightest_of_a_right_output(truth: Truth) -> None:
    """If all bounds hold, `tightest` is the bound of which the largest fraction is used."""
    right = check_output(output(truth, {}), truth, "same_precision")

    assert (right.tightest.used or 0) == max(bound.used or 0 for bound in right.bounds)


def test_judging_changes_no_tensor(truth: Truth) -> None:
    """Judging changes neither the output nor its truth."""
    out = output(truth, {(0, 0, 0, 0): 1.0})
    copies = (out.clone(), truth.out.clone(), truth.same_precision.clone())

    check_output(out, truth, "same_precision")

    assert [torch.equal(*pair) for pair in zip((out, truth.out, truth.same_precision), copies, strict=True)] == [
        True
    ] * 3


def test_a_reference_that_overflows_allows_nothing(truth: Truth) -> None:
    """The verdict can be sent as JSON, which has no infinity, and fails."""
    same_precision = truth.same_precision.clone()
    same_precision[0, 0, 0, 0] = math.inf
    out = truth.out.half()
    out[0, 0, 0, 0] = math.inf
    check = check_output(out, truth._replace(same_precision=same_precision), "same_precision")
    assert not check.passed
    assert msgspec.json.decode(msgspec.json.encode(check), type=Check) == check
