"""Find the known mistake that explains a wrong output: its exact result agrees with the output within the tolerance.

A mistake explains an output if three things hold on the compared part of the output:

1. The output passes the tolerance policy with the mistake's result in the place of truth.
2. The output does not pass it with truth.
3. The output is at the mistake's result and not between it and truth.  With d = truth - result and e = out - result,
   the part |<e, d>| / <d, d> of the way to truth is at most 0.2, and |d| is at least 20 times the RMS of e.  Under the
   loose policies, the RMS of e is at most half of the RMS error.

If several mistakes remain, each pair is compared in the same way.  If two give the same output, both are named; if more
do, none is.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from pytest_fa.attention.mistake import MAX_NAMES, Mistake
from pytest_fa.attention.scores import AXES, Computes
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.key_ranges import likely_ranges
from pytest_fa.judge.memory_mistakes import DTYPE_NAMES, OTHER_16_BIT
from pytest_fa.judge.mistaken import Predictor, Selection, scores_needed
from pytest_fa.judge.mistakes import attention_mistakes
from pytest_fa.judge.other_kinds import likely_windows, sinks
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.policies import rms, ulp
from pytest_fa.judge.rearranged import (
    LARGEST_REMAINDER,
    clamped,
    rearrangements,
    rows_scaled,
    scaled,
    times_factor,
)
from pytest_fa.judge.roundings import STEP, half_sums, rounding_mistakes
from pytest_fa.judge.scores import mistaken_scores, score_mistakes
from pytest_fa.judge.truth import Truth
from pytest_fa.judge.zeros import explain_zeros

MAX_SECONDS = 30.0  # after this time no further mistake is tried, and none is named; zeros still are
SCREENING_SCORES = 2**14  # scores per mistake in the first, coarse comparison; torch uses one thread for so few
MAX_SCORES = {"cuda": 2**24, "cpu": 2**22}  # scores per mistake in the comparison that decides
MAX_HEADS = 4  # (batch, head) pairs of a selection
MIN_ROWS = 4
SEPARATION = 20.0
LARGEST_PART = 0.2
LARGEST_REMAINDER_IF_LOOSE = 0.5  # of the RMS error, under a policy that allows more than rounding causes
BEYOND = 0.5  # the same away from another mistake; the errors of P that truncation and rounding cause are correlated
COARSE_FP8 = 0.1  # the same as a fraction of the result, for the policy `fp8`
MIN_OF_TF32 = 0.1  # of the RMS error of products in tf32; a smaller error has another reason
TF32_WORDS = "the error is no larger than that of products in tf32: compute them in fp32, or declare `rounds: [tf32]`"
MAX_ROUNDING = 30.0  # times the RMS error of the same-precision reference; a larger error has another reason
MIN_OF_SUMS = 0.3  # of the RMS error of sums in 16 bits; a smaller error has another reason
SUMS_WORDS = (
    "the error is no larger than that of sums in {0}: accumulate Q K^T and P V in float32, or declare `rounds: [s]` "
    "if only S is meant to be in {0}"
)
LARGEST_OF_GAIN = 0.1  # of the square of an error of sums that one factor of the whole output may cause
MAX_TERMS = 2**13  # of a sum that is computed term by term
SCALE_STEPS = 24  # of the search for a scale; each takes the root of its factor
COARSE = 4.0  # the first comparison allows this multiple of the error that rounding causes


class Explanation(NamedTuple):
    """The words of the mistakes that give an output, and a remark if only a part was compared; it may be false."""

    words: tuple[str, ...] = ()
    part: str = ""

    def __bool__(self) -> bool:
        return bool(self.words)

    def __str__(self) -> str:
        return "; or ".join(self.words) + self.part if self.words else ""


class MistakeResult(NamedTuple):
    """The words for a mistake, and what it gives on the compared part of the output."""

    words: str
    truth: Truth
    is_convention: bool = False


class WrongOutput(NamedTuple):
    """An output that no policy accepted."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim]
    truth: Truth
    policy: str
    computes: Computes = "attention"


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread.  On a busy machine, threads that wait for each other make small operations 50 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def explain_attention(wrong: WrongOutput, inputs: Inputs, rounds: tuple[Rounding, ...] = ()) -> Explanation:
    """The known mistakes of attention that give a wrong output, which must be finite."""
    predictor, most = Predictor(inputs, wrong.truth, rounds), MAX_SCORES[wrong.out.device.type]
    coarse, fine = _selection(wrong, SCREENING_SCORES, inputs), _selection(wrong, most, inputs)
    if check_output(fine.of(wrong.out), fine.of_truth(wrong.truth), wrong.policy).passed:
        return Explanation()
    screen = _Screen(
        Predictor(inputs, wrong.truth, rounds, with_sizes=False), coarse, coarse.of(wrong.out), wrong.policy
    )
    results: list[MistakeResult] = []
    stop_at = time.monotonic() + MAX_SECONDS
    for mistake in _candidates(wrong, predictor):
        if time.monotonic() > stop_at:
            return _zeros(wrong, inputs)
        if scores_needed(mistake, inputs, fine) <= 2 * most and screen.lets_pass(mistake):
            result = predictor.predict(mistake, fine)
            results.append(MistakeResult(mistake.words, result, mistake.is_convention))
    roundings = _roundings(wrong, predictor, fine)
    if explanation := _explanation(wrong, [*results, *roundings], fine):
        return explanation
    if zeros := _zeros(wrong, inputs):
        return zeros
    further = (_undeclared_sums, _other_scale, _row_factors, _undeclared_tf32)
    return next(filter(None, (explain(wrong, predictor, fine) for explain in further)), Explanation())


@one_thread()
def explain_scores(wrong: WrongOutput, inputs: Inputs, rounds: tuple[Rounding, ...] = ()) -> Explanation:
    """The known mistakes of scores that give a wrong output, which must be finite."""
    truth, selection = wrong.truth, Selection.all(inputs.q)
    if zeros := _zeros(wrong, inputs):
        return zeros
    if wrong.out.numel() > MAX_SCORES[wrong.out.device.type]:
        return Explanation()
    results = [
        MistakeResult(mistake.words, mistaken_scores(mistake, inputs, tf32="tf32" in rounds), mistake.is_convention)
        for mistake in score_mistakes(inputs)
    ]
    explanation = _explanation(wrong, results, selection)
    if not explanation.words:
        predictor = Predictor(inputs, truth)
        fitted = [MistakeResult(mistake.words, predictor.predict(mistake, selection)) for mistake in _fitted(wrong)]
        explanation = _explanation(wrong, fitted, selection)
    return explanation


def _zeros(wrong: WrongOutput, inputs: Inputs) -> Explanation:
    """Zeros in an output that is right but for them; this takes little time."""
    zeros = explain_zeros(wrong.out, wrong.truth, wrong.policy, inputs, wrong.computes)
    return Explanation((zeros,)) if zeros else Explanation()


def _candidates(wrong: WrongOutput, predictor: Predictor) -> Iterator[Mistake]:
    """Listed mistakes, and those that are fitted to the output, without equal ones."""
    words: set[str] = set()
    listed, ranges = attention_mistakes(predictor.inputs), likely_ranges(predictor, wrong.out.double())
    windows = likely_windows(predictor, wrong.out.double())
    for mistake in itertools.chain(listed, ranges, windows, _fitted(wrong)):
        if mistake.words not in words or mistake.moves_elements:
            yield mistake
        words.add(mistake.words)


def _fitted(wrong: WrongOutput) -> Iterator[Mistake]:
    out, right = wrong.out.double(), wrong.truth.out
    yield from rearrangements(out, right, AXES[wrong.computes])
    yield from (mistake for mistake in (scaled(out, right), clamped(out, right)) if mistake is not None)


def _roundings(wrong: WrongOutput, predictor: Predictor, selection: Selection) -> list[MistakeResult]:
    """Wrong roundings, for an output whose error is not much larger than that of right ones.

    A factor close to 1 has nearly the same effect as truncation.  It competes, so that it is not taken for one.
    """
    inputs, most, ideal = predictor.inputs, MAX_SCORES[wrong.out.device.type], wrong.truth.same_precision
    is_small = rms(wrong.out.double() - wrong.truth.out) <= MAX_ROUNDING * rms(ideal - wrong.truth.out)
    if not is_small or wrong.policy != "same_precision":
        return []
    mistakes = list(rounding_mistakes(inputs, predictor.rounds))
    if mistakes and (factor := times_factor(wrong.out.double(), wrong.truth.out)) is not None:
        mistakes.append(factor)
    results = [
        MistakeResult(mistake.words, predictor.predict(mistake, selection))
        for mistake in mistakes
        if scores_needed(mistake, inputs, selection) <= 2 * most
    ]
    return [*results, *(MistakeResult(*result) for result in half_sums(predictor, selection))]


def _undeclared_sums(wrong: WrongOutput, predictor: Predictor, _: Selection) -> Explanation:
    """Whether an output has an error that sums in its dtype may cause, if they are rounded after each term."""
    selection = _selection(wrong, SCREENING_SCORES, predictor.inputs)
    is_judged = wrong.out.dtype in OTHER_16_BIT and wrong.policy == "same_precision"
    if not is_judged or predictor.inputs.k.shape[2] > MAX_TERMS:
        return Explanation()
    out, right = selection.of(wrong.out), selection.of_truth(wrong.truth)
    by_step = [list(half_sums(predictor, selection, step))[-1][1] for step in (STEP, 1)]
    least, most = (rms(in_half.out - right.out) for in_half in by_step)
    allowed = right._replace(same_precision=by_step[1].same_precision)
    error = out.double() - right.out
    is_large = rms(error) >= MIN_OF_SUMS * min(least, most)
    # Roundings to nearest make an output neither larger nor smaller.
    whole, truth = wrong.out.double() - wrong.truth.out, wrong.truth.out
    of_gain = float((whole * truth).sum()) ** 2 / float(truth.square().sum() * whole.square().sum())
    if not is_large or of_gain > LARGEST_OF_GAIN or not check_output(out, allowed, wrong.policy).passed:
        return Explanation()
    return Explanation((SUMS_WORDS.format(DTYPE_NAMES[wrong.out.dtype]),), _part(selection, wrong.out))


def _other_scale(wrong: WrongOutput, predictor: Predictor, selection: Selection) -> Explanation:
    """A softmax scale that is not listed: the one that fits best, if it is that."""
    few = _selection(wrong, SCREENING_SCORES, predictor.inputs)
    out, right = few.of(wrong.out).double(), few.of(wrong.truth.out)
    scale = predictor.inputs.scale or predictor.inputs.q.shape[3] ** -0.5

    def remaining(factor: float) -> float:
        mistake = Mistake("", partial(_with_scale, scale * factor))
        return rms(predictor.predict(mistake, few).out - out)

    best = min((2.0**exponent for exponent in range(-6, 7)), key=remaining)
    width = 2.0
    for _ in range(SCALE_STEPS):
        width = math.sqrt(width)
        best = min((best / width, best, best * width), key=remaining)
    if remaining(best) > LARGEST_REMAINDER * rms(out - right):
        return Explanation()
    words = f"the softmax scale is {scale * best:.3g}, not {predictor.inputs.scale:.3g}: {best:.3g} times the right one"
    mistake = Mistake(words, partial(_with_scale, scale * best))
    return _explanation(wrong, [MistakeResult(words, predictor.predict(mistake, selection))], selection)


def _with_scale(scale: float, inputs: Inputs) -> Inputs:
    return inputs._replace(scale=scale)


def _row_factors(wrong: WrongOutput, predictor: Predictor, selection: Selection) -> Explanation:
    mistake = rows_scaled(wrong.out.double(), wrong.truth.out, wrong.out.dtype)
    if mistake is None:
        return Explanation()
    sink = sinks(selection.of(wrong.out).double(), selection.of_truth(wrong.truth), predictor, selection)
    if sink and (explanation := _explanation(wrong, [MistakeResult(*sink)], selection)):
        return explanation
    return _explanation(wrong, [MistakeResult(mistake.words, predictor.predict(mistake, selection))], selection)


def _undeclared_tf32(wrong: WrongOutput, predictor: Predictor, selection: Selection) -> Explanation:
    """Whether an fp32 output has an error that products in tf32 may cause, where the manifest does not declare them."""
    if wrong.out.dtype != torch.float32 or "tf32" in predictor.rounds or wrong.policy != "same_precision":
        return Explanation()
    out, result = selection.of(wrong.out), predictor.with_rounds(("tf32",)).predict(Mistake(TF32_WORDS), selection)
    is_large = rms(out.double() - result.out) >= MIN_OF_TF32 * rms(result.same_precision - result.out)
    if not is_large or not check_output(out, result, wrong.policy).passed:
        return Explanation()
    return Explanation((TF32_WORDS,), _part(selection, wrong.out))


def _explanation(wrong: WrongOutput, results: list[MistakeResult], selection: Selection) -> Explanation:
    """Those of the results that are the output, if they are one or two."""
    survivors = [result for result in results if _explains(wrong, result.truth, selection)]
    if any(result.is_convention for result in survivors):
        survivors = _without_copies(selection.of(wrong.out), survivors)
    words = _best(selection.of(wrong.out), survivors)
    return Explanation(words, _part(selection, wrong.out)) if 1 <= len(words) <= MAX_NAMES else Explanation()


def _without_copies(out: torch.Tensor, survivors: list[MistakeResult]) -> list[MistakeResult]:
    """The survivors without those that give what an earlier convention gives, too: it has the line to write."""
    kept: list[MistakeResult] = []
    for survivor in survivors:
        result = survivor.truth.out
        if not any(other.is_convention and are_same(out, result, other.truth.out) for other in kept):
            kept.append(survivor)
    return kept


def _best(out: torch.Tensor, survivors: list[MistakeResult]) -> tuple[str, ...]:
    """The words of the survivors that the output does not tell from any other, or prefers to it."""
    kept: dict[str, None] = {}
    for survivor in survivors:
        result = survivor.truth.out
        others = [other.truth.out for other in survivors if other is not survivor]
        if all(are_same(out, result, other) or is_at(out, result, other, beyond=BEYOND) for other in others):
            kept[survivor.words] = None
    return tuple(kept)


def _explains(wrong: WrongOutput, result: Truth, selection: Selection) -> bool:
    """Whether an output is a mistake's result, within the tolerance of the policy."""
    out, truth = selection.of(wrong.out), selection.of(wrong.truth.out)
    if wrong.policy != "same_precision" and rms(out - result.out) > LARGEST_REMAINDER_IF_LOOSE * rms(out - truth):
        return False
    return (
        bool(result.out.isfinite().all())
        and is_at(out, result.out, truth)
        and check_output(out, result, wrong.policy).passed
    )


class _Screen(NamedTuple):
    """A coarse form of `_explains`, for few queries."""

    predictor: Predictor
    selection: Selection
    out: torch.Tensor  # the selected part
    policy: str

    def lets_pass(self, mistake: Mistake) -> bool:
        """Whether the RMS of the error is that of rounding, or little more; a mistake of whole outputs passes."""
        if mistake.needs_all_queries or (mistake.arrange and not mistake.arranges_rows):
            return True
        result = self.predictor.predict(mistake, self.selection)
        largest = float(result.out.abs().max())
        if not largest < math.inf:  # also NaN
            return False
        rounding = rms(result.same_precision - result.out) + ulp(largest, self.out.dtype)
        if result.float32_error is not None:
            rounding = max(rounding, sum(rms(part) for part in result.float32_error))
        allowed = max(COARSE * rounding, COARSE_FP8 * rms(result.out) if self.policy == "fp8" else 0.0)
        return rms(self.out.double() - result.out) <= allowed


def is_at(out: torch.Tensor, result: torch.Tensor, other: torch.Tensor, beyond: float = LARGEST_PART) -> bool:
    """Whether an output is at `result` and not at `other` nor between them; and not `beyond` it, away from `other`."""
    if are_same(out, result, other):
        return False
    way = other - result
    part = float(((out.double() - result) * way).sum() / way.square().sum())
    return -beyond <= part <= LARGEST_PART


def are_same(out: torch.Tensor, result: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ too little for the errors of the output to tell them apart."""
    difference = float((other - result).square().sum().sqrt())
    return difference == 0 or difference < SEPARATION * rms(out.double() - result)


# -- the compared part ------------------------------------------------------------------------------------------------


def _selection(wrong: WrongOutput, most_scores: int, inputs: Inputs) -> Selection:
    """Evenly spread batches, heads and queries and the worst ones, with less than twice `most_scores` scores."""
    sizes = batch, heads, queries = wrong.out.shape[:3]
    error = (wrong.out.double() - wrong.truth.out).abs().amax(-1)  # [b, h, seq_q]
    worst = int(error.argmax())
    places = worst // (heads * queries), worst // queries % heads, worst % queries
    keys = max(1, inputs.k.shape[2])
    counts = batch, heads, queries
    if math.prod(counts) * keys > most_scores:
        pairs = MAX_HEADS if most_scores > SCREENING_SCORES else 1
        batches = min(batch, 2, pairs)
        counts = batches, min(heads, pairs // batches), queries
        counts = *counts[:2], max(MIN_ROWS, most_scores // (counts[0] * counts[1] * keys))
    indices = (evenly_spread(*axis, wrong.out.device) for axis in zip(sizes, counts, places, strict=True))
    return Selection(*indices)


def evenly_spread(size: int, count: int, worst: int, device: torch.device) -> torch.Tensor:
    """`worst` and up to `count` further indices below `size`: the first, the last and evenly spread ones."""
    if count >= size:
        return torch.arange(size, device=device)
    further = {index * (size - 1) // (count - 1) for index in range(count)} if count > 1 else set()
    return torch.tensor(sorted({worst, *further}), device=device)


def _part(selection: Selection, out: torch.Tensor) -> str:
    """A remark that only a part was compared; empty if it was everything."""
    batch, heads, queries, _ = out.shape
    compared = len(selection.batches) * len(selection.heads)
    if (compared, len(selection.queries)) == (batch * heads, queries):
        return ""
    return f" (compared on {len(selection.queries)} of {queries} queries in {compared} of {batch * heads} heads)"
