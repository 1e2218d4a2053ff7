"""Tolerance policies: each bound has the value of its formula, and an output that is not finite fails."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import UsageProblem
from pytest_fa.features.bundle.check_rules import ALLOWED, BOUNDS
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge import policies
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.policies import POLICIES, Errors, fp8, same_precision, ulp
from pytest_fa.judge.truth import Spread, Truth, make_truth
from pytest_fa.records.checks import Bound
from tests.unit.judge.mutations import Kernel, simulate

SMALL = "b1h2s64d64-fp16"


class Problem(NamedTuple):
    """One case with its truth."""

    inputs: Inputs
    truth: Truth


@functools.cache
def problem(case: str) -> Problem:
    """The problem of a case id without its seed; its truth is computed once."""
    inputs = make_inputs(parse_case(f"{case}-seed0"), torch.device("cpu"))
    return Problem(inputs, make_truth(inputs, with_spread=True))


# -- nothing that is not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 1, 31, 17), (0, 1, 63, 63)], ids=["first", "inside", "last"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_not_finite_fails(value: float, place: tuple[int, int, int, int], policy: str) -> None:
    """A single NaN or Inf in an otherwise right output fails, and the verdict names `finite` first."""
    inputs, truth = problem(SMALL)
    out = simulate(inputs, Kernel())
    out[place] = value

    check = check_output(out, truth, policy)

    assert (check.passed, check.nonfinite_count, check.tightest.name) == (False, 1, "finite")
    assert (check.worst, check.first_bad, check.bad_count) == (place, place, 1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_unwritten_output_fails(policy: str) -> None:
    """An output full of NaN breaks every bound, including the bounds that are only reported."""
    inputs, truth = problem(SMALL)

    check = check_output(torch.full_like(inputs.q, math.nan), truth, policy)

    assert [bound.holds for bound in check.bounds] == [False] * len(check.bounds)
    assert check.bad_count == check.nonfinite_count == check.element_count == inputs.q.numel()


@pytest.mark.parametrize("broken", ["out", "same_precision"])
def test_truth_that_is_not_finite_fails(broken: str) -> None:
    """If truth or the same-precision reference has a NaN, no output passes."""
    inputs, truth = problem(SMALL)
    with_nan = getattr(truth, broken).clone()
    with_nan[0, 0, 5, 5] = math.nan

    check = check_output(simulate(inputs, Kernel()), truth._replace(**{broken: with_nan}), "same_precision")

    assert not check.passed


# -- the bounds by their formulas -------------------------------------------------------------------------------------

ROWS, DIMS, SEQ_K = 4, 16, 2**15
# The magnitude of the same-precision reference's error in every element, so large that one step of an element is less.
Y = 2.0**-7
SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(DIMS // 2)
U = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # ulp(1)
SYSTEMATIC_GAIN = {torch.float16: 3e-5, torch.bfloat16: 2.4e-4}


def bounds_of(error: torch.Tensor, dtype: torch.dtype, y: float = Y) -> dict[str, Bound]:
    """The bounds of `same_precision` for `error`, on a truth of ones and a reference with alternating errors +-y."""
    ones = torch.ones(1, 1, ROWS, DIMS, dtype=torch.float64)
    errors = Errors(ones + error, error, Truth(ones, ones + y * SIGNS, SEQ_K, ones[..., 0]), dtype)
    return {bound.name: bound for bound in same_precision(errors).bounds}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_allowed_values(dtype: torch.dtype) -> None:
    """Each bound allows what its formula gives."""
    bounds = bounds_of(torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64), dtype)

    u = U[dtype]
    assert {name: bound.allowed for name, bound in bounds.items()} == pytest.approx(
        {
            "finite": 0.0,
            "max": 2 * Y + 3 * u / 4,
            "rms": 1.5 * Y + u / 8,
            "row rms": 5 * Y + u / 8,
            "gain": 20 * Y / math.sqrt(ROWS * DIMS) + SYSTEMATIC_GAIN[dtype] + SEQ_K / 2**28,
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_elements_may_be_off_by_one_step(dtype: torch.dtype) -> None:
    """Where the elements of a row are equal and the reference has no error, 3/4 ulp are allowed, also in all rows."""
    bounds = bounds_of(torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64), dtype, y=0.0)

    assert [bounds[name].allowed / U[dtype] for name in ("max", "rms", "row rms")] == [0.75] * 3


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["max", "rms", "row rms", "gain"])
def test_edge_of_each_bound(name: str, dtype: torch.dtype, factor: float) -> None:
    """A bound holds for an error just below it and breaks for an error just above it."""
    zeros = torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64)
    allowed = bounds_of(zeros, dtype)[name].allowed * factor
    error = zeros.clone()
    if name == "max":
        error[0, 0, 2, 3] = -allowed
    elif name == "rms":
        error += allowed * SIGNS
    elif name == "row rms":
        error[0, 0, 1] = allowed * SIGNS
    else:
        error += allowed

    bound = bounds_of(error, dtype)[name]

    assert bound.holds == (factor < 1)
    assert bound.used == pytest.approx(factor, rel=1e-9)


def test_row_is_judged_by_its_own_size() -> None:
    """A row that is a hundred times smaller than the others is allowed a hundredth of their error."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(1, 1, 64, 64, generator=generator, dtype=torch.float64)
    truth[0, 0, 7] /= 100
    ideal = truth.half().double()
    relative = float((ideal - truth).square().mean().sqrt() / truth.square().mean().sqrt())
    error = torch.zeros_like(truth)
    error[0, 0, 7] = truth[0, 0, 7] * relative * 12

    bounds = same_precision(
        Errors(truth + error, error, Truth(truth, ideal, SEQ_K, truth.square().mean(-1).sqrt()), torch.float16)
    ).bounds

    assert {bound.name for bound in bounds if not bound.holds} == {"row rms"}


def test_row_that_cancels_is_judged_by_its_weights() -> None:
    """A row that is zero because the values of V cancel is allowed the error of a row with the same weights."""
    truth = torch.ones(1, 1, ROWS, DIMS, dtype=torch.float64)
    ideal = truth + Y * SIGNS
    truth[0, 0, 2], ideal[0, 0, 2] = 0.0, 0.0
    error = torch.zeros_like(truth)
    error[0, 0, 2] = 4 * Y * SIGNS

    def row_holds(row_size: torch.Tensor) -> bool:
        errors = Errors(truth + error, error, Truth(truth, ideal, SEQ_K, row_size), torch.float16)
        return next(bound.holds for bound in same_precision(errors).bounds if bound.name == "row rms")

    assert [row_holds(torch.ones(1, 1, ROWS)), row_holds(torch.zeros(1, 1, ROWS))] == [True, False]


def test_gain_of_correlated_errors() -> None:
    """If all errors of a row have one sign, the gain is allowed the average of S_q errors, not of S_q * D."""
    ones = torch.ones(1, 1, ROWS, DIMS, dtype=torch.float64)

    bounds = same_precision(Errors(ones, ones * 0, Truth(ones, ones + Y, 0, ones[..., 0]), torch.float16)).bounds

    (allowed,) = [bound.allowed for bound in bounds if bound.name == "gain"]
    assert allowed == pytest.approx(10 * Y / math.sqrt(ROWS) + 3e-5, rel=1e-12)


@pytest.mark.parametrize(
    ("row", "norm4_size", "share"),
    [(1.0, 0.5, 0.25 / 2), (1.0, 1.0, 1 / 2), (1.2, 0.5, 0.44 / 1.44 / 2), (1e3, 0.5, 1 / 2), (1e3, 0.0, 0.0)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gain_of_rounded_p(dtype: torch.dtype, row: float, norm4_size: float, share: float) -> None:
    """The gain is allowed four standard deviations of the roundings of P, of which each is up to half an ulp.

    A row that is larger than its weights make it counts with what exceeds them.  A row of one tile does not count.
    """
    ones = torch.ones(1, 1, ROWS, DIMS, dtype=torch.float64)
    truth = Truth(row * ones, row * (ones + 1e-6 * SIGNS), 0, ones[..., 0], norm4_size=ones[..., 0] * norm4_size)

    bounds = same_precision(Errors(truth.out, ones * 0, truth, dtype)).bounds

    (allowed,) = [bound.allowed for bound in bounds if bound.name == "gain"]
    by_element, by_p = 1e-6 / math.sqrt(ROWS * DIMS), U[dtype] / 2 * min(1, 4 / math.sqrt(3) * share)
    assert allowed == pytest.approx(max(20 * by_element, 4 * by_element + by_p) + SYSTEMATIC_GAIN[dtype], rel=1e-5)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.001, False)])
def test_rows_that_are_alike_are_rounded_alike(factor: float, passes: bool) -> None:  # noqa: FBT001
    """With a scale of 0, all 512 rows are the mean of V and round alike: this passes, and a factor of 1.001 fails."""
    inputs = problem("b1h2s512d64-fp16")[0]._replace(scale=0.0)
    mean = inputs.v.double().mean(2, keepdim=True) * factor  # [batch, heads, 1, head_dim]
    out = mean.to(torch.float16).expand(inputs.q.shape)
    assert check_output(out, make_truth(inputs), "same_precision").passed is passes


def test_head_of_zeros_has_no_gain() -> None:
    """If a head's truth is all zeros, for example because it sees no key, zeros pass and anything else fails."""
    zeros = torch.zeros(1, 2, ROWS, DIMS, dtype=torch.float64)
    truth = Truth(zeros, zeros, SEQ_K, zeros[..., 0])
    small = torch.zeros(1, 2, ROWS, DIMS, dtype=torch.float16)
    small[0, 1, 0, 0] = 1e-4

    assert check_output(small * 0, truth, "same_precision").passed
    assert not check_output(small, truth, "same_precision").passed


def test_gain_is_judged_per_head() -> None:
    """One head that is scaled by 1.01 breaks the bound of the gain."""
    inputs, truth = problem("b1h2s512d64-fp16")
    out = simulate(inputs, Kernel())
    out[:, 1] *= 1.01

    assert not next(bound for bound in check_output(out, truth, "same_precision").bounds if bound.name == "gain").holds


# -- fp8 --------------------------------------------------------------------------------------------------------------

LARGEST_V, SPREAD, ALONG_ROW = 4.0, 0.5, 2.0


def fp8_truth(out: torch.Tensor, of_sum: torch.Tensor, along_row: float, largest_v: float) -> Truth:
    """A truth with a spread, for fp16."""
    spread = Spread(of_sum, torch.full_like(out[..., 0], along_row), torch.full_like(out[..., :1, :1], largest_v))
    return Truth(out, out, SEQ_K, out[..., 0], spread)


def fp8_bounds(error: torch.Tensor, dtype: torch.dtype = torch.float16) -> dict[str, Bound]:
    """The bounds of `fp8` for a truth of ones with the same spread in every element."""
    ones = torch.ones(1, 1, ROWS, DIMS, dtype=torch.float64)
    errors = Errors(ones + error, error, fp8_truth(ones, ones * SPREAD, ALONG_ROW, LARGEST_V), dtype)
    return {bound.name: bound for bound in fp8(errors).bounds}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_allowed_values(dtype: torch.dtype) -> None:
    """Each bound allows what its formula gives, for both output dtypes; the older thresholds are not judged."""
    bounds = fp8_bounds(torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64), dtype)

    assert {name: bound.allowed for name, bound in bounds.items()} == pytest.approx(
        {
            "finite": 0.0,
            "max": 0.12 * SPREAD + LARGEST_V / 512,
            "relative rms": 0.035 * (1 + 1 / math.sqrt(ROWS)),
            "gain": 0.002 + 6 * 0.0265 * math.sqrt(ALONG_ROW / ROWS) / DIMS,
            "max_err": 0.06,
            "rel_err": 1e-3,
        },
        rel=1e-12,
    )
    assert [name for name, bound in bounds.items() if not bound.enforced] == ["max_err", "rel_err"]


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6])
@pytest.mark.parametrize("name", ["max", "relative rms", "gain", "max_err", "rel_err"])
def test_edge_of_each_fp8_bound(name: str, factor: float) -> None:
    """A bound holds for an error just below it and breaks for an error just above it."""
    zeros = torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64)
    allowed = fp8_bounds(zeros)[name].allowed * factor
    error = zeros.clone()
    if name in ("max", "max_err"):
        error[0, 0, 2, 3] = -allowed
    else:
        error += allowed

    bound = fp8_bounds(error)[name]

    assert bound.holds == (factor < 1)
    assert bound.used == pytest.approx(factor, rel=1e-9)


def test_fp8_bad_elements_are_those_over_their_own_limit() -> None:
    """An element is bad if its error is above its own limit, even if elements with a larger spread may have it."""
    zeros = torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64)
    of_sum = zeros + 1.0
    of_sum[0, 0, 1, 5] = 0.1
    out = (zeros + 0.1).half()

    check = check_output(out, fp8_truth(zeros, of_sum, 0.0, 0.0), "fp8")

    assert (check.passed, check.bad_count, check.first_bad) == (False, 1, (0, 0, 1, 5))


def test_fp8_rows_that_contribute_to_the_error() -> None:
    """A head in which one row has all the error is allowed twice the relative RMS error of many equal rows."""
    zeros = torch.zeros(1, 2, 10_000, DIMS, dtype=torch.float64)
    of_sum = zeros + 1.0
    of_sum[0, 1, 1:] = 0.0
    truth, allowed = fp8_truth(zeros, of_sum, 0.0, 0.0), []
    for head in range(2):
        error = zeros.clone()
        error[0, head] = 0.5  # the bound that is shown is that of the head with an error
        bounds = {bound.name: bound for bound in fp8(Errors(error, error, truth, torch.float16)).bounds}
        allowed.append(bounds["relative rms"].allowed)

    assert allowed == pytest.approx([0.035 * 1.01, 0.035 * 2], rel=1e-9)


def test_fp8_truth_that_is_small_by_chance() -> None:
    """Where terms cancel, the relative RMS error refers to the size of the terms and not to that of their sum."""
    ones = torch.ones(1, 1, ROWS, DIMS, dtype=torch.float64)
    errors = Errors(ones * 0.03, ones * 0.02, fp8_truth(ones * 0.01, ones, 1.0, 1.0), torch.float16)

    bounds = {bound.name: bound for bound in fp8(errors).bounds}

    assert bounds["relative rms"].value == pytest.approx(0.02)
    assert bounds["relative rms"].holds


def test_fp8_head_of_zeros() -> None:
    """If V is all zeros, zeros pass and any other output fails."""
    zeros = torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64)
    truth = fp8_truth(zeros, zeros, 0.0, 0.0)
    small = zeros.half()
    small[0, 0, 2, 3] = 1e-6

    broken = [bound.name for bound in check_output(small, truth, "fp8").bounds if bound.enforced and not bound.holds]

    assert check_output(zeros.half(), truth, "fp8").passed
    assert broken == ["max", "relative rms"]


def test_fp8_needs_the_spread(snapshot: SnapshotAssertion) -> None:
    """A truth without a spread is refused, and the error says how to make one."""
    inputs, truth = problem(SMALL)

    with pytest.raises(UsageProblem) as caught:
        check_output(simulate(inputs, Kernel()), truth._replace(spread=None), "fp8")

    assert snapshot == str(caught.value)


# -- absolute ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "passed"), [(0.0, True), (0.00199, True), (0.00201, False), (-0.00201, False), (1.0, False)]
)
def test_absolute(error: float, passed: bool) -> None:  # noqa: FBT001  # a parameter
    """The policy `absolute` passes if and only if all errors are below 0.002."""
    zeros = torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64)
    out = zeros.to(torch.float16)
    out[0, 0, 3, 5] = error

    assert check_output(out, Truth(zeros, zeros, SEQ_K, zeros[..., 0]), "absolute").passed == passed


def test_absolute_judges_fp16_only(snapshot: SnapshotAssertion) -> None:
    """The policy `absolute` refuses bf16, whose rounding alone breaks it, and the error names `same_precision`."""
    inputs, truth = problem("b1h2s64d64-bf16")

    with pytest.raises(UsageProblem) as caught:
        check_output(simulate(inputs, Kernel()), truth, "absolute")

    assert snapshot == str(caught.value)


@pytest.mark.parametrize(
    ("magnitude", "dtype", "distance"),
    [
        (1.0, torch.float16, 2.0**-10),
        (1.999, torch.float16, 2.0**-10),
        (2.0, torch.float16, 2.0**-9),
        (0.999, torch.float16, 2.0**-11),
        (65504.0, torch.float16, 32.0),
        (6.2e-5, torch.float16, 2.0**-24),
        (1e-9, torch.float16, 2.0**-24),
        (0.0, torch.float16, 2.0**-24),
        (1.0, torch.bfloat16, 2.0**-7),
        (3.0, torch.bfloat16, 2.0**-6),
        (1e-40, torch.bfloat16, 2.0**-133),
        (0.0, torch.bfloat16, 2.0**-133),
    ],
)
def test_ulp(magnitude: float, dtype: torch.dtype, distance: float) -> None:
    """The distance between adjacent values doubles at each power of two and is at least the smallest subnormal."""
    assert ulp(magnitude, dtype) == distance


def test_a_bundle_is_verified_by_the_same_constants() -> None:
    """`bundle verify`, which imports no torch, has copies of what the policies allow on any data."""
    assert BOUNDS.keys() == policies.POLICIES.keys()
    assert ALLOWED["absolute", "max"] == policies.ABSOLUTE_MAX_DIFF
    assert ALLOWED["fp8", "max_err"] == policies.FP8_OLD_MAX_ERR
    assert ALLOWED["fp8", "rel_err"] == policies.FP8_OLD_REL_ERR
