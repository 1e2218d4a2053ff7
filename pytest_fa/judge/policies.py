"""Tolerance policies: each turns the errors of an output into bounds, which hold or do not.  NaN breaks every bound.

- `same_precision` bounds the errors by those of the same-precision reference on the same data.  It therefore needs no
  tolerance that is tuned for each shape.
- `fp8` is for kernels that round P to e4m3.  Its bounds follow from the effect of that rounding on a sum.
- `absolute` is the older fixed threshold, kept for comparison with old results.

`tests/unit/judge/mutations.py` has the simulated kernels, right and wrong, on which the constants were tried, and the
list of those that each policy must reject.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fa.errors import UsageProblem
from pytest_fa.judge.float32_error import Float32Error
from pytest_fa.judge.truth import Truth
from pytest_fa.records.checks import Bound

ABSOLUTE_MAX_DIFF = 0.002
FP8_ROUNDING = 0.0265  # the relative error of rounding to e4m3, in RMS
FP8_RELATIVE_RMS = 0.035
GAIN_ROWS = 64  # queries of a tile whose gain is bounded
FP8_OLD_MAX_ERR = 0.06
FP8_OLD_REL_ERR = 1e-3

# Significand bits after the leading one, and the exponent of the smallest subnormal (IEEE 754 binary16 and binary32;
# bfloat16).
_FRACTION_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
_SMALLEST_EXPONENT = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}
# The systematic part of a head's gain error: what rounding alone may cause, besides its random part.
_SYSTEMATIC_GAIN = {torch.float16: 3e-5, torch.bfloat16: 2.4e-4}
# The same for tensor cores, which truncate to float32 when they add: O shrinks by up to 2^-24 for every 16 keys.  Over
# 16384 keys, torch's memory-efficient SDPA loses 3.5e-5 (fp16, D = 128, on an H200).  A simulation of that truncation
# loses 2.7e-5 with 16 keys per addition, and 5.0e-5 with 8.
_SYSTEMATIC_GAIN_PER_KEY = 2.0**-24 / 16
_TINY = 1e-300  # replaces an RMS of 0 in a denominator
_BARELY_MORE = 1 + 2.0**-30  # float64 sums may give 1 - 2^-53 for 1, whose ulp is half of that of 1


class Errors(NamedTuple):
    """An output, its error, and the truth with the same-precision reference."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim] float64
    error: torch.Tensor  # [batch, heads, seq_q, head_dim] float64, out - truth; NaN and Inf where out has them
    truth: Truth
    dtype: torch.dtype  # of the output, before it became float64


class PolicyResult(NamedTuple):
    """The bounds of a policy, and the largest error that it allows in each element."""

    bounds: tuple[Bound, ...]
    limit: float | torch.Tensor  # the same for all elements, or [batch, heads, seq_q, head_dim]


Policy = Callable[[Errors], PolicyResult]


def same_precision(errors: Errors) -> PolicyResult:
    """Bound an output's error by the error of the same-precision reference, as a maximum, an RMS, per row and per head.

    Let Y and R be the maximum and the RMS of the reference's error over the whole output, and u = ulp(max|truth|).

    - max: max|error| <= 2Y + 3u/4.  A right kernel sums in another order than the reference, so its largest error has
      the same size but another value.  u/2 is the largest error of one rounding of the output to nearest; the rest is
      for a P that outweighs all others, where a kernel does not always rescale to the latest maximum.
    - rms: RMS(error) <= 1.5R + u/8.  An RMS over many elements varies less than a maximum, so the factor is smaller.
      u/8 allows for the same rounding; in rows whose elements are all rounded alike, 3/4 ulp does.  See `_steps`.
    - row rms: the same for each row, in proportion to the row's own size.  See `_rows`.
    - gain: |gain - 1| <= 20 `_gain_noise` + `_systematic_gain` for each head.  The gain is the factor g for which
      g * truth fits the output best in least squares.  It averages over S_q * D elements, so that it reveals systematic
      errors far below the maximum.

    Where sums cancel, as in gradients, rounding does not cause all of the error.  With z, the RMS of `Truth.row_noise`
    over all rows, R is sqrt(R^2 + z^2), and max may be 8 times the largest row's noise more.  Of gradients, few numbers
    may make up the error, which the reference may round well by chance.  So 2Y and 1.5R have a factor, `_room`, and the
    gain error of a head may be 2.5 times what `_gain_of_rows` says.

    The constants are tested with simulated kernels: right ones use less than 0.98 of each bound, and each listed
    mistake uses more than 1.1 of at least one (`tests/unit/judge/test_mutations.py`).

    The bounds of an fp32 output are those of `_float32`.  Raises `UsageProblem` if its truth has no `float32_error`.
    """
    if errors.dtype == torch.float32:
        return _float32(errors, errors.truth.float32_error)
    ideal = errors.truth.same_precision - errors.truth.out  # the error of an ideal kernel
    u = ulp(float(errors.truth.out.abs().max()) * _BARELY_MORE, errors.dtype)
    noise, lost = (_per_row(errors.truth, figure) for figure in (errors.truth.row_noise, errors.truth.row_lost))
    ideal_rms = math.hypot(rms(ideal), rms(noise))
    expected = _expected_rows(errors, ideal, ideal_rms).hypot(noise.hypot(lost))
    gain_noise, room = 20 * _gain_noise(errors, ideal, ideal_rms), 1.0
    if errors.truth.row_noise is not None:
        gain_noise, room = gain_noise.maximum(2.5 * _gain_of_rows(errors, expected)), _room(expected)
    max_allowed = 2 * room * float(ideal.abs().max()) + 8 * float(noise.max()) + 0.75 * u
    steps = _steps(errors)
    bounds = (
        _finite(errors),
        _bound("max", float(errors.error.abs().max()), max_allowed),
        _bound("rms", rms(errors.error), max(1.5 * room * ideal_rms + u / 8, rms(steps))),
        _rows(errors, expected, steps),
        _gain(errors, gain_noise + _systematic_gain(errors)),
    )
    return PolicyResult(bounds, max_allowed)


def _per_row(truth: Truth, figure: torch.Tensor | None) -> torch.Tensor:
    """A figure of each row, [batch, heads, seq_q], or zeros."""
    return torch.zeros_like(truth.row_size) if figure is None else figure


def _float32(errors: Errors, expected: Float32Error | None) -> PolicyResult:
    """Bound an fp32 output's error by the size of the error that float32 sums cause on these data.

    Let s be the standard deviation of an element's error and b its bias (see `float32_error`).

    - max: |error| <= 8 max(s, rms(s of the row)) + b for each element.
    - rms: RMS(error) <= (1.5 + 3 / sqrt(rows)) RMS(s) + RMS(b).  The errors of a row have parts in common, so that the
      output has as many independent errors as rows.
    - row rms: rms(error row) <= 5 rms(s of the row) + rms(b of the row).
    - gain: |gain - 1| <= (4 RMS(s) + RMS(b)) / rms(truth) for each head, even if all its errors have the same sign.

    Simulated right kernels use at most 0.4 of each bound, or 0.95 if they cut tf32 off.  On random data, P or an input
    rounded to 10 bits where nothing is declared uses at least 10 times a bound (`tests/unit/judge/test_float32.py`).
    """
    if expected is None:
        needs = "policy 'same_precision' needs the truth's float32_error for an fp32 output, which is missing"
        raise UsageProblem(f"{needs}; use make_truth with fp32 inputs")
    s, b = expected
    rows = s.shape[0] * s.shape[1] * s.shape[2]
    row_s = _row_rms(s)  # [b, h, seq_q]
    limit = 8 * torch.maximum(s, row_s[..., None]) + b
    head_size = errors.truth.out.square().mean((-1, -2)).sqrt()  # [b, h]
    gain_allowed = (4 * s.square().mean((-1, -2)).sqrt() + b.square().mean((-1, -2)).sqrt()) / head_size
    bounds = (
        _finite(errors),
        _worst("max", errors.error.abs(), limit),
        _bound("rms", rms(errors.error), (1.5 + 3 / math.sqrt(rows)) * rms(s) + rms(b)),
        _worst("row rms", _row_rms(errors.error), 5 * row_s + _row_rms(b)),
        _gain(errors, gain_allowed),
    )
    return PolicyResult(bounds, limit)


def fp8(errors: Errors) -> PolicyResult:
    """Bound the error of kernels that round P to e4m3.  Inputs are the dequantised ones, the output is fp16 or bf16.

    Rounding p to four significant bits changes it by 2.65 % in RMS and by 1/16 at most.  The errors of different keys
    are independent, so their squares add up: w = sqrt(sum p^2 v^2) is the size of their sum in units of that error.

    - max: |error| <= 0.12 w + max|v| / 512 for each element.  12 % is 4.5 times 2.65 %.  1/512 is the smallest e4m3
      number, which is the step between the values of P below the normal range.
    - relative rms: RMS(error) <= 3.5 % (1 + 1/sqrt(rows)) max(RMS(truth), RMS(w)) for each head.  Over many rows the
      relative error is 2.65 %.  In one row, a single key may have nearly all the weight, and its error may be 6.25 %.
      `rows` is `_equal_rows`.  The RMS of w replaces that of a truth that is small by chance.
    - gain: |gain - 1| <= 0.002 + 6 s for each head and each tile of 64 queries.  See `_gains_over_rows`, which gives
      the gain and its standard deviation s.

    Simulated right kernels use less than 0.98 of each bound, with a single query as with thousands
    (`tests/unit/judge/test_fp8_kernels.py`).  They scale P by a number that e4m3 has, or raise the row maximum lazily.
    Another scale rounds the largest P of all rows in one direction, and the gain of 64 rows rejects it.

    Two thresholds of older results are reported and not enforced, because right kernels break them: `max_err`, 0.06 for
    the maximum, and `rel_err`, 1e-3 for the relative RMS.

    Raises `UsageProblem` if the truth has no `spread`.
    """
    truth, spread = errors.truth.out, errors.truth.spread
    if spread is None:
        raise UsageProblem("policy 'fp8' needs the truth's spread, which is missing; use make_truth(with_spread=True)")
    limit = 0.12 * spread.of_sum + spread.largest_v / 512  # [b, h, seq_q, d]
    relative, largest = rms(errors.error) / max(rms(truth), _TINY), float(errors.error.abs().max())
    size = torch.maximum(_head_rms(truth), _head_rms(spread.of_sum)).clamp_min(_TINY)  # [b, h]
    rms_allowed = FP8_RELATIVE_RMS * (1 + _equal_rows(spread.of_sum).rsqrt())
    gain_error, gain_noise = _gains_over_rows(errors, FP8_ROUNDING**2 * spread.along_row)
    bounds = (
        _finite(errors),
        _worst("max", errors.error.abs(), limit),
        _worst("relative rms", _head_rms(errors.error) / size, rms_allowed),
        _worst("gain", gain_error, 0.002 + 6 * gain_noise),
        _bound("max_err", largest, FP8_OLD_MAX_ERR, enforced=False),
        _bound("rel_err", relative, FP8_OLD_REL_ERR, enforced=False),
    )
    return PolicyResult(bounds, limit)


def absolute(errors: Errors) -> PolicyResult:
    """Require max|error| < 0.002, for fp16 only.  Raises `UsageProblem` for another dtype."""
    if errors.dtype != torch.float16:
        raise UsageProblem(f"policy 'absolute' judges fp16 only, the output is {errors.dtype}; use 'same_precision'")
    worst = float(errors.error.abs().max())
    largest = errors.truth.max_error or ABSOLUTE_MAX_DIFF
    bounds = (_finite(errors), Bound("max", _number(worst), largest, worst < largest))
    return PolicyResult(bounds, largest)


POLICIES: dict[str, Policy] = {"same_precision": same_precision, "absolute": absolute, "fp8": fp8}
READS_SPREAD = frozenset({"fp8"})  # the policies that need `make_truth(with_spread=True)`


def policy_for(truth: Truth, policy: str) -> str:
    """The policy by which an output is compared with this truth: `absolute` if the user has said the largest error."""
    return policy if truth.max_error is None else "absolute"


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between adjacent values of `dtype` at `magnitude`."""
    smallest = _SMALLEST_EXPONENT[dtype]
    if magnitude == 0:
        return 2.0**smallest
    return 2.0 ** max(smallest, math.frexp(magnitude)[1] - 1 - _FRACTION_BITS[dtype])


def ulps(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`ulp` of every element."""
    exponent = torch.frexp(magnitude).exponent - 1 - _FRACTION_BITS[dtype]
    exponent = exponent.where(magnitude > 0, _SMALLEST_EXPONENT[dtype])
    return torch.exp2(exponent.clamp_min(_SMALLEST_EXPONENT[dtype]).double())


def rms(tensor: torch.Tensor) -> float:
    """Root mean square."""
    return float(tensor.square().mean().sqrt())


def _finite(errors: Errors) -> Bound:
    """The number of elements that are NaN or Inf; none is allowed."""
    return _bound("finite", float((~errors.out.isfinite()).sum()), 0.0)


def _rows(errors: Errors, expected: torch.Tensor, steps: torch.Tensor) -> Bound:
    """Bound the RMS error of each row: rms(error row) <= 5 max(rms(reference's error row), r size) + ulp(max|row|) / 8.

    The bound is at least `steps`; see `_steps`.

    Gradients have another factor, `Truth.row_factor`, and sqrt(max(...)^2 + noise^2) in place of the maximum, with
    `noise`, [batch, heads, seq_q].

    r = R / rms(truth) is the reference's relative error over the whole output, or R / rms(noise) where truth is less
    than noise, and `row` is the row of truth.  `size`
    is the larger of rms(row) and `Truth.row_size` = sqrt(sum p^2) rms(v).  The second matters where the columns of V
    are alike: a row may then be zero by chance, but its error is not.  Without it, right kernels broke the bound
    eightfold on such data.

    Rows are bounded in proportion to their own size because sizes differ.  Under a mask, rows that see few keys average
    only those, and are up to sqrt(S_k) times as large as the last.  With a bound of 5R + u/8 for all rows, the last row
    could lack a key: that mistake used 0.44 of the bound at 1023 keys and 0.19 at 4096 keys in fp16.  It uses 1.7 and
    1.5 of this one.

    Right kernels use at most 0.25 on random data.  Where all columns of V are alike, the error of a row is one random
    number and not an average, and right kernels use up to 0.59.  Hence the factor is 5 and not 3.
    """
    truth, factor = errors.truth.out, errors.truth.row_factor
    allowed = (factor * expected + ulps(truth.abs().amax(-1), errors.dtype) / 8).maximum(steps)
    return _worst("row rms", _row_rms(errors.error), allowed)


def _steps(errors: Errors) -> torch.Tensor:
    """3/4 ulp of each row whose exact elements differ by at most 1/8 ulp, and 0 of others, [batch, heads, seq_q].

    The elements of such a row are all rounded alike.  With a V full of ones, the reference has no error, but a right
    kernel that does not always rescale to the latest maximum may be off by one step.  Rows of zeros are not rounded.
    """
    truth = errors.truth.out
    largest = truth.abs().amax(-1)
    are_alike = (truth.amax(-1) - truth.amin(-1) <= ulps(largest, errors.dtype) / 8) & (largest > 0)
    return 0.75 * ulps(largest * _BARELY_MORE, errors.dtype) * are_alike


def _expected_rows(errors: Errors, ideal: torch.Tensor, ideal_rms: float) -> torch.Tensor:
    """The RMS error that rounding causes in each row, [batch, heads, seq_q]; see `_rows`."""
    truth = errors.truth.out
    relative = ideal_rms / max(rms(truth), rms(_per_row(errors.truth, errors.truth.row_noise)), _TINY)
    return torch.maximum(_row_rms(ideal), relative * torch.maximum(_row_rms(truth), errors.truth.row_size))


def _head_rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean((-1, -2)).sqrt()  # [b, h]


def _row_rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean(-1).sqrt()  # [b, h, seq_q]


def _equal_rows(of_sum: torch.Tensor) -> torch.Tensor:
    """The number of rows of a head that contribute to its error, at least 1, [batch, heads].

    It is (sum of squares of w)^2 / sum over rows of (sum of squares of w)^2: S_q if all rows are of the same size, and
    less under a mask, where the rows that see few keys have the largest errors.
    """
    row = of_sum.square().sum(-1)  # [b, h, seq_q]
    return (row.sum(-1).square() / row.square().sum(-1).clamp_min(_TINY)).clamp_min(1)


def _gain_noise(errors: Errors, ideal: torch.Tensor, ideal_rms: float) -> torch.Tensor:
    """The change of each head's gain that random errors of the reference's size cause, [batch, heads].

    It is the largest of three estimates, for errors that are independent in different units:

    - elements: (R / rms(truth of the head)) / sqrt(S_q D), the standard deviation of an average of S_q * D errors.
    - rows: sqrt(sum over rows of <reference's error, truth>^2) / <truth, truth> / 2.  It is needed where few rows make
      up the head, as under a mask when V is zero except for its last keys.  Right kernels use 60 times the first
      estimate there.
    - heads: |<reference's error, truth>| / <truth, truth> / 10, a tenth of the reference's own gain error.  It is
      needed where all rows are alike, as with a scale of zero, and are therefore all rounded in the same direction.
      With the factor 20 of the bound, a kernel may have twice the reference's gain error.
    - roundings of P: a fifth of the first estimate + `_gain_of_rounded_p` / 20.  The first estimate is too small for a
      head where one key outweighs the others in few rows: its truth is large, and the reference's largest P is exactly
      1.  A kernel that does not always rescale to the latest maximum rounds it.  The bound allows for that, and four
      standard deviations of all other errors.
    """
    truth = errors.truth.out
    power = truth.square().sum((-1, -2))  # [b, h]
    by_rows = (ideal * truth).sum(-1).square().sum(-1).sqrt() / power
    by_head = (ideal * truth).sum((-1, -2)).abs() / power
    by_element = ideal_rms / power.sqrt()
    by_p = by_element / 5 + _gain_of_rounded_p(errors) / 20
    return torch.stack([by_element, by_rows / 2, by_head / 10, by_p]).amax(0)


def _gain_of_rows(errors: Errors, expected: torch.Tensor) -> torch.Tensor:
    """The change of each head's gain if the expected error of each row of a gradient has its direction, [batch, heads].

    It is sqrt(sum over rows of (|expected error| |truth|)^2) / <truth, truth>.  A row of a gradient may be
    a sum over few keys, so that rounding its dS makes it longer or shorter.  Where many rows are as large, this is less
    than what the elements give; it is more where few make up the head.  With three rows, right kernels have up to 2.3
    times this, where the reference is right by chance.
    """
    size = errors.truth.out.square().sum(-1)  # [b, h, rows], squared
    error = errors.truth.out.shape[-1] * expected.square()
    return (error * size).sum(-1).sqrt() / size.sum(-1)


def _room(expected: torch.Tensor) -> float:
    """1 + 1 / sqrt(n) for a gradient to whose error n rows contribute as much as all do, by their expected errors.

    With two rows, a right kernel that rounds P before it makes dS of it used 1.4 of `max` and 1.6 of `rms` without it.
    """
    share = (expected / expected.max().clamp_min(_TINY)).square()
    return 1 + float(share.square().sum().sqrt() / share.sum().clamp_min(1))


def _gain_of_rounded_p(errors: Errors) -> torch.Tensor | float:
    """The gain error of each head if every P is rounded, also the largest, [batch, heads]; 0 if there is no P.

    It is r min(1, 4/sqrt(3) sqrt(sum over rows of w^2) / <truth, truth>): four standard deviations, and at most r.

    Rounding changes a P by up to r = 2^-11 of itself (bf16: 2^-8), in RMS by at most r / sqrt(3), and the row's
    <output, truth> by that part of p <v, truth>.  The roundings of keys and rows are independent, so their squares add
    up.  The keys that matter are those that make up the row, for which <v, truth> = p |v|^2.  With |v|^2 = D rms(v)^2,
    w = D rms(v)^2 sqrt(sum p^4), which is D `Truth.norm4_size`^2.  A row that is larger than random V makes it, which
    is `Truth.row_size`, has few keys with a large v: w is at least D (rms(row)^2 - row_size^2).

    w is 0 in a row without a sink that sees none after the first 16 keys.  They are in one tile, so that its largest P
    is exactly 1 in any kernel.  Under a causal mask, such rows are the largest, and would hide a wrong denominator.  A
    kernel may begin with the sink as the maximum, and need not rescale for a slightly larger key.
    """
    truth, size = errors.truth.out, errors.truth.norm4_size
    if size is None:
        return 0.0
    rounding = 2.0 ** -(_FRACTION_BITS[errors.dtype] + 1)
    of_row = torch.maximum(size.square(), truth.square().mean(-1) - errors.truth.row_size.square())
    of_row = of_row.where(size > 0, 0.0)  # [b, h, seq_q]
    share = truth.shape[-1] * of_row.square().sum(-1).sqrt() / truth.square().sum((-1, -2))
    return rounding * (4 / math.sqrt(3) * share).clamp_max(1)


def _systematic_gain(errors: Errors) -> float:
    """The systematic gain error that rounding and tensor cores may cause: 3e-5 (bf16: 2.4e-4) + terms / 2^28."""
    return _SYSTEMATIC_GAIN[errors.dtype] + errors.truth.terms * _SYSTEMATIC_GAIN_PER_KEY


def _gain(errors: Errors, allowed: torch.Tensor) -> Bound:
    """Bound each head's gain error |<out, truth> / <truth, truth> - 1| by `allowed`, [batch, heads].

    A lost key, a wrong scale or a wrong denominator breaks this bound long before it breaks the maximum.  A head whose
    truth is all zeros, or no more than what float32 leaves of sums that cancel, has no gain; only the other bounds
    apply to it.
    """
    truth = errors.truth.out
    power = truth.square().sum((-1, -2))  # [b, h]
    has_gain = power > truth.shape[-1] * _per_row(errors.truth, errors.truth.row_noise).square().sum(-1)
    gain = ((errors.out * truth).sum((-1, -2)) / power - 1).abs()
    return _worst("gain", gain.where(has_gain, 0.0), allowed.where(has_gain, 1.0))


def _gains_over_rows(errors: Errors, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gain errors of each head and of each of its tiles of 64 queries, with their standard deviations.

    Both are [batch, heads, 1 + tiles].  A row's gain error is <error, truth> / <truth, truth>, and `variance`
    [batch, heads, seq_q] is the expected square of <error, truth>.  A gain is a mean over rows, each weighted by the
    inverse of its variance.  So rows that see few keys, in which one may have all the weight, do not hide
    that the others are 1 % off, and tiles show the first rows themselves.  Rows of zeros have no gain and no weight.
    """
    truth = errors.truth.out
    power = truth.square().sum(-1)  # [b, h, seq_q]
    weight = (power / variance).where(power > 0, 0.0)  # of <error, truth>; times the power, it is that of the gain
    precision = _with_tiles(weight * power)  # 1 / variance of the mean
    gain_error = _with_tiles(weight * (errors.error * truth).sum(-1)) / precision
    has_gain = precision > 0
    return gain_error.abs().where(has_gain, 0.0), precision.rsqrt().where(has_gain, 1.0)


def _with_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Sums over all rows and over each tile of 64 rows: [batch, heads, seq_q] -> [batch, heads, 1 + tiles]."""
    missing = -rows.shape[-1] % GAIN_ROWS
    padded = torch.nn.functional.pad(rows, (0, missing))
    tiles = padded.reshape(*rows.shape[:2], -1, GAIN_ROWS).sum(-1)
    return torch.cat([tiles.sum(-1, keepdim=True), tiles], dim=-1)


def _worst(name: str, values: torch.Tensor, allowed: torch.Tensor) -> Bound:
    """The bound of the element that uses the largest fraction of what it is allowed; NaN and Inf use the most."""
    used = (values / allowed).masked_fill((values == 0) & (allowed == 0), 0.0)  # 0/0 is NaN, which argmax would select
    used = torch.where(values.isfinite(), used, torch.inf)
    index = int(used.argmax())
    return _bound(name, float(values.flatten()[index]), float(allowed.flatten()[index]))


def _bound(name: str, value: float, allowed: float, *, enforced: bool = True) -> Bound:
    return Bound(name, _number(value), allowed, value <= allowed, enforced)


def _number(value: float) -> float | None:
    """The value, or None if it is not finite."""
    return value if math.isfinite(value) else None
