"""The bounds of fp32 and tf32 under simulated kernels: right ones pass with a margin, wrong ones fail."""

from __future__ import annotations

import functools

import pytest
import torch

from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Rounding
from pytest_fa.errors import UsageProblem
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.float32_error import to_tf32
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.records.checks import Check
from tests.tiers import nightly_after
from tests.unit.judge.float32_kernels import (
    DATA,
    MISTAKES,
    RIGHT,
    RIGHT_TF32,
    UNDECLARED,
    Float32Kernel,
    compute,
    cut_off,
    to_bf16,
    unchanged,
)

# One tile, one row, few rows and many keys, more dimensions and fewer keys than queries, and rows that see no key.
SHAPES = (
    "b1h1s64d64-fp32",
    "b1h1s1d128-fp32-sk512",
    "b1h1s17d64-fp32-sk1023",
    "b1h1s100d256-fp32-sk77",
    "b1h1s203d64-fp32-causal_br-sk113",
)
LARGEST = "b1h1s32d256-fp32-sk4096"
TF32: tuple[Rounding, ...] = ("tf32",)


@functools.lru_cache(maxsize=4)
def solved(shape: str, data: str, rounds: tuple[Rounding, ...] = (), seed: int = 0) -> tuple[Inputs, Truth]:
    """The inputs of a shape with their truth."""
    inputs = DATA[data](make_inputs(parse_case(f"{shape}-seed{seed}"), torch.device("cpu")))
    return inputs, make_truth(inputs, rounds)


def check_of(kernel: Float32Kernel, inputs: Inputs, truth: Truth) -> Check:
    """The verdict on a simulated kernel."""
    return check_output(compute(inputs, kernel), truth, "same_precision")


def most_used(check: Check) -> float:
    """The largest fraction that is used of any bound."""
    return max(bound.used or 0.0 for bound in check.bounds)


CELLS = [(shape, data) for shape in SHAPES for data in DATA] + [(LARGEST, "N(0, 1)"), (LARGEST, "scores x 30")]


@pytest.mark.parametrize(("shape", "data"), nightly_after(2 * len(DATA), CELLS))
def test_right_kernels_pass(shape: str, data: str) -> None:
    """Kernels that add in any order, with an exact or a fast exp, use less than half of each bound on any data."""
    problem = solved(shape, data)

    checks = {name: check_of(kernel, *problem) for name, kernel in RIGHT.items()}

    assert {name: most_used(check) for name, check in checks.items() if most_used(check) > 0.5} == {}
    assert [check.bad_count for check in checks.values()] == [0] * len(RIGHT)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("shape", SHAPES)
def test_right_tf32_kernels_pass_if_declared(shape: str, data: str) -> None:
    """With `rounds: [tf32]`, kernels that round to nearest or cut bits off use less than 0.98 of each bound."""
    problem = solved(shape, data, TF32)

    used = {name: most_used(check_of(kernel, *problem)) for name, kernel in RIGHT_TF32.items()}

    assert {name: fraction for name, fraction in used.items() if fraction > 0.98} == {}


@pytest.mark.parametrize("name", UNDECLARED)
@pytest.mark.parametrize("data", ["N(0, 1)", "V is K"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3], LARGEST])
def test_undeclared_roundings_are_rejected(shape: str, data: str, name: str) -> None:
    """P or an input rounded to tf32, fp16 or bf16 is rejected where the manifest declares no rounding."""
    check = check_of(UNDECLARED[name], *solved(shape, data))

    assert (check.passed, check.nonfinite_count) == (False, 0)
    assert most_used(check) > 2


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("rounds", [(), TF32], ids=["fp32", "tf32"])
def test_mistakes_are_rejected(name: str, rounds: tuple[Rounding, ...]) -> None:
    """A dropped key, a wrong scale and a forgotten rescale are rejected; tf32 hides a scale that is 0.01 % off."""
    kernel = MISTAKES[name] if not rounds else MISTAKES[name]._replace(qk=cut_off, p=cut_off, v=cut_off)

    check = check_of(kernel, *solved("b1h2s512d64-fp32", "N(0, 1)", rounds))

    assert check.passed == (name == "scale 0.01 % off" and bool(rounds))


def test_bf16_is_rejected_where_tf32_is_declared() -> None:
    """Inputs rounded to bf16, which has three bits fewer than tf32, are rejected with `rounds: [tf32]`."""
    kernel = Float32Kernel(qk=to_bf16, p=to_bf16, v=to_bf16)

    assert [check_of(kernel, *solved(shape, "N(0, 1)", TF32)).passed for shape in SHAPES] == [False] * len(SHAPES)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.001, False)])
def test_scores_of_fp32(factor: float, passes: bool) -> None:  # noqa: FBT001  # a parameter
    """Scores that are added dimension by dimension in float32 pass, and those 0.1 % too large fail."""
    inputs = make_inputs(parse_case("b1h2s65d256-fp32-sk64-seed0"), torch.device("cpu"))
    scores = torch.zeros(1, 2, 65, 64)
    for d in range(256):
        scores = scores + inputs.q[..., d : d + 1] * inputs.k[..., d][:, :, None, :]

    check = check_output(
        scores * (inputs.scale * factor), truth_of("scores", inputs, (), "same_precision"), "same_precision"
    )

    assert check.passed is passes


def test_scores_in_tf32_must_be_declared() -> None:
    """Scores of inputs rounded to tf32 pass with `rounds: [tf32]` and fail without."""
    inputs = make_inputs(parse_case("b1h2s65d64-fp32-sk64-seed0"), torch.device("cpu"))
    scores = (cut_off(inputs.q) @ cut_off(inputs.k).transpose(2, 3)) * inputs.scale

    truths = [truth_of("scores", inputs, rounds, "same_precision") for rounds in ((), TF32)]

    assert [check_output(scores, truth, "same_precision").passed for truth in truths] == [False, True]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (1.0 + 2.0**-11, 1.0 + 2.0**-10),  # a tie, away from zero
        (-1.0 - 2.0**-11, -1.0 - 2.0**-10),
        (1.0 + 2.0**-11 - 2.0**-23, 1.0),
        (2.0 - 2.0**-23, 2.0),
        (0.0, 0.0),
    ],
)
def test_rounding_to_tf32(value: float, rounded: float) -> None:
    """Values are rounded to 10 bits to nearest, and ties away from zero, as by cvt.rna."""
    assert to_tf32(torch.tensor([value], dtype=torch.float64)).tolist() == [rounded]


def test_truth_of_fp32_is_that_of_float64() -> None:
    """Truth on fp32 inputs is attention in float64, and declared roundings do not change it."""
    inputs, truth = solved(SHAPES[4], "N(0, 1)")
    q, k, v = (tensor.double() for tensor in inputs[:3])

    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(203, 113, dtype=torch.bool).tril(-90)
    )

    torch.testing.assert_close(truth.out, expected.nan_to_num(), rtol=0, atol=1e-13)
    assert torch.equal(truth.out, make_truth(inputs, TF32).out)


@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_math_mask"])
def test_sdpa_computes_fp32_products_in_fp32(name: str) -> None:
    """A candidate that allows products in bf16 or tf32 does not change SDPA's fp32 output, and keeps its setting."""
    sdpa = load_forward(discover(()).variants[name], None)
    inputs = make_inputs(parse_case("b1h1s512d64-fp32-seed0"), torch.device("cpu"))
    before = sdpa(*inputs[:3], scale=inputs.scale)
    torch.set_float32_matmul_precision("medium")
    try:
        after, setting = sdpa(*inputs[:3], scale=inputs.scale), torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision("highest")

    assert (torch.equal(before, after), setting) == (True, "medium")


def test_a_truth_without_the_error_of_float32_is_an_error() -> None:
    """For an fp32 output, the policy says that the truth lacks the error of float32, and how to get it."""
    inputs, truth = solved("b1h1s17d64-fp32-sk1023", "N(0, 1)")
    out = compute(inputs, RIGHT["tiles of 64"])
    with pytest.raises(UsageProblem, match=r"'same_precision' needs the truth's float32_error .* use make_truth with"):
        check_output(out, truth._replace(float32_error=None), "same_precision")


@pytest.mark.parametrize("rounds", [(), TF32])
def test_scores_are_diagnosed(rounds: tuple[Rounding, ...]) -> None:
    """The mistakes of fp32 scores are named, each within the error of its own result."""
    inputs = make_inputs(parse_case("b1h2s32d64-fp32-sk64-seed0"), torch.device("cpu"))
    truth = truth_of("scores", inputs, rounds, "same_precision")
    rounded = cut_off if rounds else unchanged
    product = rounded(inputs.q) @ rounded(inputs.k).transpose(2, 3)
    wrong_k = rounded(inputs.q) @ rounded(inputs.k)
    for out, name in (
        (product, "the scale is not applied"),
        (product * inputs.scale**2, "the scale is 1/D"),
        (product * inputs.scale * 1.01, "the scale is 1 % too large"),
        (wrong_k * inputs.scale, "K is transposed once too often"),
    ):
        check = check_output(out, truth, "same_precision")
        assert not check.passed
        cause = diagnose(out, truth, inputs, check, None, (), "scores", rounds).cause
        assert cause.startswith(name)


@pytest.mark.parametrize("name", UNDECLARED)
def test_an_undeclared_rounding_is_named(name: str) -> None:
    """An error of the size of tf32 is named where tf32 is not declared; a larger one is not."""
    inputs, truth = solved("b1h1s100d256-fp32-sk77", "N(0, 1)")
    out = compute(inputs, UNDECLARED[name])
    cause = diagnose(out, truth, inputs, check_output(out, truth, "same_precision"), None, ()).cause
    assert cause.startswith("the error is no larger than that of products in tf32") == (name != "P to bf16")
