"""Tolerance policies: right kernels pass, each kind of wrong one fails, and nothing that is not finite gets through."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import UsageProblem
from pytest_fa.judge.check import judge
from pytest_fa.judge.policies import Errors, measured, ulp
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.report.record import Bound
from pytest_fa.run.inputs import Inputs, make_inputs

DTYPES = ("fp16", "bf16")
SHAPES = ("b1h2s64d64", "b1h2s512d64", "b1h1s1023d64", "b1h1s4096d64")


class Problem(NamedTuple):
    """One case with its truth."""

    inputs: Inputs
    truth: Truth


@functools.cache
def problem(shape: str, dtype: str, more: str = "") -> Problem:
    """The problem of a case id's parts; its truth is computed once."""
    inputs = make_inputs(parse_case(f"{shape}-{dtype}{more}-seed0"), torch.device("cpu"))
    return Problem(inputs, make_truth(inputs))


# -- a right kernel, and what can be wrong with it --------------------------------------------------------------------


class Hole(NamedTuple):
    """What a kernel does wrong; by default nothing."""

    tile: int = 64
    scale: float = 1.0
    keys_lost: int = 0  # at the end of the sequence
    tile_skipped: int | None = None
    keys_uncounted: int = 0  # at the end of the sequence, in the denominator alone
    rescales: bool = True
    tiles_of_v: dict[int, int] = {}  # noqa: RUF012  # a tile of V read in place of another
    diagonal: int = 0


def kernel(inputs: Inputs, hole: Hole) -> torch.Tensor:
    """FlashAttention's forward in float32, key tile by key tile, P rounded to the dtype before it meets V."""
    q, k, v = (tensor.float() for tensor in inputs[:3])  # [b, h, s, d]
    dtype, length, end = inputs.q.dtype, q.shape[2], k.shape[2] - hole.keys_lost
    o = torch.zeros_like(q)
    m = torch.full_like(q[..., :1], -math.inf)
    l = torch.zeros_like(m)  # noqa: E741  # the papers' name
    for index, start in enumerate(range(0, end, hole.tile)):
        if index == hole.tile_skipped:
            continue
        keys = slice(start, min(start + hole.tile, end))
        first = 0 if inputs.causal == "none" else max(0, start - hole.diagonal)  # rows above see nothing of this tile
        s = q[:, :, first:] @ k[:, :, keys].transpose(2, 3) * (inputs.scale * hole.scale)
        if inputs.causal != "none":
            rows, columns = torch.arange(first, length)[:, None], torch.arange(keys.start, keys.stop)[None]
            s = s.masked_fill(columns > rows + hole.diagonal, -math.inf)
        m_new = torch.maximum(m[:, :, first:], s.amax(-1, keepdim=True))
        rescale = torch.exp(m[:, :, first:] - m_new)
        p = torch.exp(s - m_new)
        counted = p[..., : max(0, min(keys.stop, end - hole.keys_uncounted) - keys.start)]
        instead = hole.tiles_of_v.get(index, index) * hole.tile
        v_tile = v[:, :, instead : instead + p.shape[-1]]
        m[:, :, first:] = m_new
        l[:, :, first:] = l[:, :, first:] * rescale + counted.sum(-1, keepdim=True)
        o[:, :, first:] = o[:, :, first:] * (rescale if hole.rescales else 1.0) + p.to(dtype).float() @ v_tile
    return (o / l).to(dtype)


def wrong_row(inputs: Inputs, hole: Hole) -> torch.Tensor:
    """One row of one head holds its neighbour's result."""
    out = kernel(inputs, hole)
    row = out.shape[2] // 2
    out[0, 0, row] = out[0, 0, row - 1]
    return out


# Each mistake: the kernel that makes it, and the mask that it needs.
MISTAKES: dict[str, tuple[Callable[[Inputs, Hole], torch.Tensor], Hole, str]] = {
    "last key dropped": (kernel, Hole(keys_lost=1), ""),
    "tile dropped": (kernel, Hole(tile_skipped=1, tile=32), ""),
    "scale 1 % off": (kernel, Hole(scale=1.01), ""),
    "denominator misses 16 keys": (kernel, Hole(keys_uncounted=16), ""),
    "rescale forgotten": (kernel, Hole(rescales=False, tile=32), ""),
    "V tiles swapped": (kernel, Hole(tiles_of_v={0: 1, 1: 0}, tile=32), ""),
    "mask off by one": (kernel, Hole(diagonal=1), "-causal"),
    "one row wrong": (wrong_row, Hole(), ""),
}


@pytest.mark.parametrize("mask", ["", "-causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "tile"), [*((shape, tile) for shape in SHAPES[:3] for tile in (64, 128)), (SHAPES[3], 128)]
)
def test_right_kernel_passes(shape: str, dtype: str, mask: str, tile: int) -> None:
    """A right kernel of the same precision passes at every length, with room left and yet not for free."""
    inputs, truth = problem(shape, dtype, mask)

    check = judge(kernel(inputs, Hole(tile=tile)), truth, "measured")

    assert (check.passed, check.bad_count, check.first_bad) == (True, 0, None)
    assert 0.2 < (check.tightest.used or 0) < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES[:3], "b1h1s1024d64-sk4096"])
@pytest.mark.parametrize("mistake", [name for name, (_, _, mask) in MISTAKES.items() if not mask])
def test_mistake_fails(shape: str, dtype: str, mistake: str) -> None:
    """Each kind of mistake is caught at every length, in both dtypes, by at least one bound with a margin."""
    run, hole, _ = MISTAKES[mistake]
    size, _, keys = shape.partition("-")
    inputs, truth = problem(size, dtype, f"-{keys}" if keys else "")

    check = judge(run(inputs, hole), truth, "measured")

    assert not check.passed
    assert max(bound.used or 0 for bound in check.bounds if not bound.holds) > 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_causal_mask_off_by_one_fails(shape: str, dtype: str) -> None:
    """A diagonal that lets each query see one key too many is caught at every length."""
    run, hole, mask = MISTAKES["mask off by one"]
    inputs, truth = problem(shape, dtype, mask)

    check = judge(run(inputs, hole), truth, "measured")

    assert not check.passed
    assert (check.tightest.used or 0) > 40


def test_one_wrong_row_of_4096_fails() -> None:
    """One wrong row among 4096 is lost in every average; its own row's bound catches it."""
    inputs, truth = problem("b1h1s4096d64", "bf16")

    check = judge(wrong_row(inputs, Hole()), truth, "measured")

    held = {bound.name: bound.holds for bound in check.bounds}
    assert (check.passed, held["row rms"], held["finite"]) == (False, False, True)


# -- nothing that is not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["measured", "absolute"])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 1, 31, 17), (0, 1, 63, 63)], ids=["first", "inside", "last"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_not_finite_fails(value: float, place: tuple[int, int, int, int], policy: str) -> None:
    """A single NaN or Inf anywhere in an output that is right elsewhere fails, and is what the verdict names first."""
    inputs, truth = problem("b1h2s64d64", "fp16")
    out = kernel(inputs, Hole())
    out[place] = value

    check = judge(out, truth, policy)

    assert (check.passed, check.nonfinite_count, check.tightest.name) == (False, 1, "finite")
    assert (check.worst, check.first_bad, check.bad_count) == (place, place, 1)


@pytest.mark.parametrize("policy", ["measured", "absolute"])
def test_nothing_written_fails(policy: str) -> None:
    """An output that is all NaN breaks every bound."""
    inputs, truth = problem("b1h2s64d64", "fp16")

    check = judge(torch.full_like(inputs.q, math.nan), truth, policy)

    assert [bound.holds for bound in check.bounds] == [False] * len(check.bounds)
    assert check.bad_count == check.nonfinite_count == check.element_count == inputs.q.numel()


@pytest.mark.parametrize("broken", ["out", "yardstick"])
def test_truth_that_is_not_finite_fails(broken: str) -> None:
    """A NaN in the truth or the yardstick makes no output right."""
    inputs, truth = problem("b1h2s64d64", "fp16")
    spoiled = getattr(truth, broken).clone()
    spoiled[0, 0, 5, 5] = math.nan

    check = judge(kernel(inputs, Hole()), truth._replace(**{broken: spoiled}), "measured")

    assert not check.passed


# -- the bounds by their formulas -------------------------------------------------------------------------------------

ROWS, DIMS = 4, 16
Y = 2.0**-9  # the yardstick's error, in every element
U = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # ulp(1)
GAIN_FLOOR = {torch.float16: 3e-5, torch.bfloat16: 2.4e-4}


def bounds_of(error: torch.Tensor, dtype: torch.dtype) -> dict[str, Bound]:
    """`measured` on a truth of ones, where the yardstick is off by Y everywhere and the output by `error`."""
    ones = torch.ones(1, 1, ROWS, DIMS, dtype=torch.float64)
    errors = Errors(ones + error, error, Truth(ones, ones + Y), dtype)
    return {bound.name: bound for bound in measured(errors)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_allowed_values(dtype: torch.dtype) -> None:
    """What each bound allows is what its formula says."""
    bounds = bounds_of(torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64), dtype)

    u = U[dtype]
    assert {name: bound.allowed for name, bound in bounds.items()} == pytest.approx(
        {
            "finite": 0.0,
            "max": 2 * Y + u / 2,
            "rms": 1.5 * Y + u / 8,
            "row rms": 5 * Y + u / 8,
            "gain": 20 * Y / math.sqrt(ROWS * DIMS) + GAIN_FLOOR[dtype],
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["max", "rms", "row rms", "gain"])
def test_edge_of_each_bound(name: str, dtype: torch.dtype, factor: float) -> None:
    """An error just within a bound holds it, one just beyond breaks it."""
    zeros = torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64)
    allowed = bounds_of(zeros, dtype)[name].allowed * factor
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(DIMS // 2)
    error = zeros.clone()
    if name == "max":
        error[0, 0, 2, 3] = -allowed
    elif name == "rms":
        error += allowed * signs
    elif name == "row rms":
        error[0, 0, 1] = allowed * signs
    else:
        error += allowed

    bound = bounds_of(error, dtype)[name]

    assert bound.holds == (factor < 1)
    assert bound.used == pytest.approx(factor, rel=1e-9)


def test_head_of_zeros_has_no_gain() -> None:
    """A head whose truth is all zeros, as one that sees no key, is right when it is zero, and wrong when it is not."""
    zeros = torch.zeros(1, 2, ROWS, DIMS, dtype=torch.float64)
    truth = Truth(zeros, zeros)
    small = torch.zeros(1, 2, ROWS, DIMS, dtype=torch.float16)
    small[0, 1, 0, 0] = 1e-4

    assert judge(small * 0, truth, "measured").passed
    assert not judge(small, truth, "measured").passed


def test_gain_is_each_head_own() -> None:
    """One head out of many that is scaled shows, however small its values are beside the others'."""
    inputs, truth = problem("b1h2s512d64", "fp16")
    out = kernel(inputs, Hole())
    out[:, 1] *= 1.01

    assert not next(bound for bound in judge(out, truth, "measured").bounds if bound.name == "gain").holds


@pytest.mark.parametrize(
    ("error", "passed"), [(0.0, True), (0.00199, True), (0.00201, False), (-0.00201, False), (1.0, False)]
)
def test_absolute(error: float, passed: bool) -> None:  # noqa: FBT001  # a parameter
    """The older policy allows errors below 0.002 and nothing else."""
    zeros = torch.zeros(1, 1, ROWS, DIMS, dtype=torch.float64)
    out = zeros.to(torch.float16)
    out[0, 0, 3, 5] = error

    assert judge(out, Truth(zeros, zeros), "absolute").passed == passed


def test_absolute_judges_fp16_only() -> None:
    """The older policy refuses bf16, which cannot keep it, and names the one that can judge it."""
    inputs, truth = problem("b1h2s64d64", "bf16")

    with pytest.raises(UsageProblem) as caught:
        judge(kernel(inputs, Hole()), truth, "absolute")

    assert str(caught.value) == ("policy 'absolute' judges fp16 only, the output is torch.bfloat16; use 'measured'")


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
    """The distance between neighbours doubles at each power of two and ends at the smallest subnormal."""
    assert ulp(magnitude, dtype) == distance
