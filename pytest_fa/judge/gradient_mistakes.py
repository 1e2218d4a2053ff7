"""Find the likely cause of wrong gradients: the known mistakes that give them, or else where they are wrong.

Each gradient is compared with what each mistake makes of it (`mistaken_gradients`), under the same bounds as with its
truth, except for that of its gain.  The mistakes that explain most gradients are named first.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from pytest_fa.attention.backward import OF_KEYS
from pytest_fa.attention.mistake import MAX_NAMES
from pytest_fa.gpu.inputs import Inputs, is_poison
from pytest_fa.judge.backward_mistakes import backward_mistakes, wrong_factors
from pytest_fa.judge.error_location import place_text
from pytest_fa.judge.explain import MAX_SECONDS, MIN_OF_SUMS, SEPARATION, are_same, evenly_spread, is_at, one_thread
from pytest_fa.judge.gradients import Upstream, check_gradients
from pytest_fa.judge.lost_ranges import lost_ranges
from pytest_fa.judge.memory_mistakes import memory_mistakes
from pytest_fa.judge.mistaken import all_hidden
from pytest_fa.judge.mistaken_gradients import (
    NAMES,
    BackwardCall,
    GradientMistake,
    GradientPlaces,
    GradientPredictor,
    Pass,
)
from pytest_fa.judge.output_check import check_output, limits
from pytest_fa.judge.padding import NAME as OF_PADDING
from pytest_fa.judge.padding import cleared, explain_padding
from pytest_fa.judge.part_gradient_mistakes import explain_part_gradients
from pytest_fa.judge.policies import rms, ulp
from pytest_fa.judge.roundings import STEP, accumulated
from pytest_fa.judge.row_scores import positions_of
from pytest_fa.judge.truth import Truth

AXES_OF_KEYS = ("batch", "key head", "key", "dim")
AXES_OF = {"dq": ("batch", "head", "query", "dim"), "dk": AXES_OF_KEYS, "dv": AXES_OF_KEYS}
AXES_OF_TENSORS = ("batch", "head", "query", "key")  # of gradients of a bias and the like
INPUT_OF = {"dq": "q", "dk": "k", "dv": "v"}
FEWEST_SCORES = 2**15  # per mistake in the first, coarse comparison
MAX_SCORES = {"cuda": 2**24, "cpu": 2**20}  # per mistake in the comparison that decides
MIN_ROWS = 4
COARSE = 8.0  # the first comparison allows this multiple of the error that rounding causes
BEYOND = 0.5  # the part of the way from another mistake's result that a gradient may be beyond its own
LOOSE = frozenset({"gain"})  # bounds that hold for a gradient whose only errors are those of rounding
LIKE_GAIN = 0.02  # relative; a factor that is fitted before it is tried
MOST_BAD_ROWS = 0.9  # of a gradient whose right rows are told from others
BAD_ROW = 6.0  # times the error that rounding causes


class WrongGradients(NamedTuple):
    """What a kernel wrote, and what it should have written."""

    written: Mapping[str, torch.Tensor]  # [batch, heads, rows, dim] each
    truths: Mapping[str, Truth]  # of the same names
    inputs: Inputs
    upstream: Upstream
    bad: tuple[str, ...]  # the names of those that are wrong


def explain_gradients(
    written: Mapping[str, torch.Tensor], truths: Mapping[str, Truth], inputs: Inputs, upstream: Upstream
) -> str:
    """The likely cause of wrong gradients, in one sentence or two; else where they are wrong.  It is never empty."""
    truths = {name: truth for name, truth in truths.items() if name in written}
    if of_padding := _padding(written, truths):
        return of_padding
    written = {name: cleared(truth.padding, written[name]) for name, truth in truths.items()}
    truths = {name: truth._replace(padding=None) for name, truth in truths.items()}
    bad = tuple(name for name, check in check_gradients(written, truths).items() if not check.passed)
    wrong = WrongGradients(written, truths, inputs, upstream, bad)
    causes = (explain(wrong) for explain in (_unwritten, _nonfinite, _exchanged, _known))
    return next(filter(None, causes), "") or f"{_where(wrong, bad)}; no known mistake gives these gradients"


def _padding(written: Mapping[str, torch.Tensor], truths: Mapping[str, Truth]) -> str:
    """What became of rows that belong to no query or key, if only those are wrong."""
    checks = check_gradients(written, truths).values()
    if {bound.name for check in checks for bound in check.bounds if not bound.holds} != {OF_PADDING}:
        return ""
    texts = {
        name: explain_padding(
            truth.padding, written[name], ("key", "keys") if name in OF_KEYS else ("query", "queries")
        )
        for name, truth in truths.items()
        if truth.padding
    }
    return "; ".join(f"{name}: {text}" for name, text in texts.items() if text)


def _unwritten(wrong: WrongGradients) -> str:
    places = {name: is_poison(written) for name, written in wrong.written.items()}
    texts = [f"{name} in {_place(name, where)}" for name, where in places.items() if bool(where.any())]
    return f"the kernel never wrote {_listed(texts)}: the NaN poison is still there" if texts else ""


def _nonfinite(wrong: WrongGradients) -> str:
    finite = {name: written.isfinite() for name, written in wrong.written.items()}
    places = {name: ~where for name, where in finite.items() if not bool(where.all())}
    if not places:
        return ""
    without_key, of_dq = _without_key(wrong.inputs), places.get("dq")
    words = "exp(-inf - -inf) is NaN, P must be 0 where the log-sum-exp is -inf"
    if of_dq is None and bool(without_key.any()):
        return f"NaN in {_listed(places)}, and some queries see no key: {words}"
    if of_dq is not None and bool((of_dq.any(-1) == without_key).all()):
        return f"NaN in dq exactly in the queries that see no key: {words}"
    texts = [f"{name} in {_place(name, where)}" for name, where in places.items()]
    looks = "look for 0/0, an overflow, or unwritten memory that it reads"
    return f"the kernel computed NaN or Inf in {_listed(texts)}: {looks}"


def _without_key(inputs: Inputs) -> torch.Tensor:
    """The queries that see no key, [seq_q] or with batch and heads."""
    inputs = inputs.exact().meant()
    queries = torch.arange(inputs.q.shape[2], device=inputs.q.device)
    return all_hidden(inputs, positions_of(inputs, queries)).all(-1)


def _exchanged(wrong: WrongGradients) -> str:
    """Two gradients, each of which is the other one."""
    for pair in itertools.combinations(wrong.bad, 2):
        if all(_is_right(wrong, *names) for names in (pair, pair[::-1])):
            rest = [name for name in wrong.bad if name not in pair]
            words = f"{_listed(pair)} are exchanged: look at the order of the outputs"
            return f"{words}; {_where(wrong, rest)}, too" if rest else words
    return ""


def _is_right(wrong: WrongGradients, name: str, of: str) -> bool:
    """Whether a gradient that was written is another one."""
    written, truth = wrong.written[name], wrong.truths[of]
    is_alike = (written.shape, written.dtype) == (truth.out.shape, wrong.written[of].dtype)
    return is_alike and check_output(written, truth, "same_precision").passed


# -- where ------------------------------------------------------------------------------------------------------------


def _where(wrong: WrongGradients, names: Iterable[str]) -> str:
    """Where some gradients are wrong."""
    return "; ".join(_where_in(wrong, name) for name in names) or "every gradient is within its bounds"


def _where_in(wrong: WrongGradients, name: str) -> str:
    written, truth = wrong.written[name], wrong.truths[name]
    bad = ~((written.double() - truth.out).abs() <= limits(written, truth, "same_precision"))
    if not bool(bad.any()):
        bad |= _bad_rows(written, truth)[..., None]
    if bool(bad.any()):
        return f"{name} is wrong in {_place(name, bad)}"
    check = check_output(written, truth, "same_precision")
    broken = ", ".join(bound.name for bound in check.bounds if bound.enforced and not bound.holds)
    return f"{name} is wrong as a whole, in {broken}"


def _place(name: str, where: torch.Tensor) -> str:
    """Which part of a gradient it is, in words."""
    return place_text(where, AXES_OF.get(name, AXES_OF_TENSORS))


def _bad_rows(written: torch.Tensor, truth: Truth) -> torch.Tensor:
    """The rows with a larger error than rounding causes, [batch, heads, rows]."""
    error, ideal = written.double() - truth.out, truth.same_precision - truth.out
    relative = rms(ideal) / max(rms(truth.out), torch.finfo(torch.float64).tiny)
    expected = torch.maximum(_of_rows(ideal), relative * torch.maximum(_of_rows(truth.out), truth.row_size))
    for figure in (truth.row_noise, truth.row_lost):
        expected = expected if figure is None else expected.hypot(figure)
    return ~(_of_rows(error) <= BAD_ROW * expected + ulp(rms(truth.out), written.dtype) / 8)


def _of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The RMS of each row."""
    return tensor.square().mean(-1).sqrt()


def _listed(names: Iterable[str]) -> str:
    """Names in words: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


# -- comparisons ------------------------------------------------------------------------------------------------------


class GradientComparison(NamedTuple):
    """Gradients at some places, and maybe which of their rows a mistake changes."""

    written: Mapping[str, torch.Tensor]  # [1, heads, rows, dim] each
    truths: Mapping[str, Truth]
    predictor: GradientPredictor
    changed: Mapping[str, torch.Tensor] | None = None  # [1, heads, rows] each; None: all

    @classmethod
    def of(
        cls, wrong: WrongGradients, problem: BackwardCall, places: GradientPlaces, *, in_bad_rows: bool = False
    ) -> GradientComparison:
        """The part of gradients at some places."""
        names = [name for name in wrong.written if name in NAMES]
        written = {name: places.of(name, wrong.written[name]) for name in names}
        truths = {name: places.of_truth(name, wrong.truths[name]) for name in names}
        changed = {name: _bad_rows(written[name], truths[name]) for name in names} if in_bad_rows else None
        return cls(written, truths, GradientPredictor(problem, wrong.truths, places), changed)

    def may_fit(self, mistake: GradientMistake, name: str) -> bool:
        """A coarse form of `fits`: the error is that of rounding, or little more."""
        right, written = self.truths[name], self.written[name].double()
        exact = self._merged(name, self.predictor.exact(mistake, name), right.out)
        largest, size = float(exact.abs().max()), max(rms(right.out), torch.finfo(torch.float64).tiny)
        if not largest < math.inf:  # also NaN
            return False
        noise = 0.0 if right.row_noise is None else rms(right.row_noise)
        relative = math.hypot(rms(right.same_precision - right.out), noise) / size
        rounding = relative * max(rms(exact), size) + ulp(largest, self.written[name].dtype)
        return rms(written - exact) <= COARSE * rounding

    def fit(self, mistake: GradientMistake, name: str) -> Truth | None:
        """A mistake's result, if a gradient is that and not the right one."""
        right, written, result = self.truths[name], self.written[name], self.predictor.predict(mistake, name)
        out, ideal = (self._merged(name, *each) for each in zip(result[:2], right[:2], strict=True))
        result = result._replace(out=out, same_precision=ideal)
        if not bool(out.isfinite().all()) or not is_at(written, out, right.out):
            return None
        bounds = check_output(written, result, "same_precision").bounds
        return result if all(bound.holds for bound in bounds if bound.name not in LOOSE) else None

    def gain(self, mistake: GradientMistake, name: str) -> float:
        """The factor of a mistake's result that fits a gradient best; NaN for a result of zeros or one with NaN."""
        exact = self.predictor.exact(mistake, name)
        power = float(exact.square().sum())
        return float((self.written[name].double() * exact).sum()) / power if power else math.nan

    def changes(self, mistake: GradientMistake, name: str) -> bool:
        """Whether a mistake changes a gradient by more than rounding does."""
        right = self.truths[name]
        change = float((self.predictor.exact(mistake, name) - right.out).norm())
        return change > SEPARATION * rms(right.same_precision - right.out)

    def _merged(self, name: str, result: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return result if self.changed is None else result.where(self.changed[name][..., None], right)


def _worst_batch(wrong: WrongGradients, names: Iterable[str]) -> int:
    errors = ((wrong.written[name].double() - wrong.truths[name].out).square().sum((1, 2, 3)) for name in names)
    return int(torch.stack([each / each.amax() for each in errors]).sum(0).argmax())


def _places(wrong: WrongGradients, batch: int, scores: int, *, in_bad_rows: bool = False) -> GradientPlaces:
    """Evenly spread queries and keys and the worst ones, with about so many scores."""
    heads, queries, keys = wrong.inputs.q.shape[1], wrong.inputs.q.shape[2], wrong.inputs.k.shape[2]
    of_queries = _worst_rows(wrong, batch, ("dq",), queries, in_bad_rows=in_bad_rows)
    of_keys = _worst_rows(wrong, batch, ("dk", "dv"), keys, in_bad_rows=in_bad_rows)
    counts = (max(MIN_ROWS, scores // max(1, heads * others)) for others in (keys, queries))
    rows = (
        _spread(each, count, wrong.inputs.q.device) for each, count in zip((of_queries, of_keys), counts, strict=True)
    )
    return GradientPlaces(batch, *rows)


def _worst_rows(
    wrong: WrongGradients, batch: int, names: tuple[str, ...], rows: int, *, in_bad_rows: bool
) -> tuple[list[int], int]:
    """The rows of which some are chosen, and the place of the worst among them."""
    size = torch.zeros(rows, dtype=torch.float64, device=wrong.inputs.q.device)
    bad = torch.zeros(rows, dtype=torch.bool, device=wrong.inputs.q.device)
    for name in (each for each in names if each in wrong.bad):
        written, truth = wrong.written[name], wrong.truths[name]
        error = (written[batch].double() - truth.out[batch]).square().sum((0, 2))
        size += error / error.amax().clamp_min(torch.finfo(torch.float64).tiny)
        bad |= _bad_rows(written, truth)[batch].any(0)
    chosen = bad.nonzero().flatten().tolist() if in_bad_rows and bool(bad.any()) else list(range(rows))
    worst = int(size.argmax()) if rows else 0
    return chosen, chosen.index(worst) if worst in chosen else 0


def _spread(rows: tuple[list[int], int], count: int, device: torch.device) -> torch.Tensor:
    chosen, worst = rows
    places = evenly_spread(len(chosen), count, worst, torch.device("cpu"))
    return torch.tensor(chosen, dtype=torch.long, device=device)[places.to(device)]


# -- known mistakes ---------------------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """A mistake, and the gradients that it explains."""

    mistake: GradientMistake
    names: tuple[str, ...]
    is_complete: bool  # whether it explains all that it changes

    @property
    def words(self) -> str:
        """The words of the mistake, with the names of the gradients where the words do not imply them."""
        if "{}" in self.mistake.words:
            return self.mistake.words.format(_listed(self.names))
        return self.mistake.words if self.is_complete else f"{self.mistake.words} (in {_listed(self.names)})"


@one_thread()
def _known(wrong: WrongGradients) -> str:
    """The known mistakes that explain most gradients, and where the others are wrong; empty if there are none."""
    names = [name for name in NAMES if name in wrong.bad]
    explained = _explained(wrong, names) if names else {}
    of_parts = {name: wrong.written[name] for name in wrong.bad if name not in NAMES}
    explained |= explain_part_gradients(of_parts, wrong.truths, wrong.inputs, wrong.upstream)
    rest = [name for name in wrong.bad if not any(name in of for of in explained.values())]
    texts = [*explained, *([f"{_where(wrong, rest)}, too"] if rest else [])]
    return "; and ".join(texts) if explained else ""


def _explained(wrong: WrongGradients, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Sentences, each with the names of the gradients that it explains."""
    batch, remaining, explained = _worst_batch(wrong, names), names, {}
    problem, stop_at = BackwardCall.of(wrong.inputs, wrong.upstream, batch), time.monotonic() + MAX_SECONDS
    for in_bad_rows, candidates in STAGES:
        tried = [name for name in remaining if not in_bad_rows or _is_partly_right(wrong, name)]
        if not tried:
            continue
        coarse, fine = _comparisons(wrong, problem, batch, in_bad_rows=in_bad_rows)
        mistakes = candidates(Compared(coarse, fine, tried, wrong))
        for words, of in _causes(coarse, fine, mistakes, tried, stop_at):
            explained[f"{words}{_rows_text(wrong, of) if in_bad_rows else ''}"] = of
            remaining = [name for name in remaining if name not in of]
    fine = _comparisons(wrong, problem, batch)[1]
    if of := tuple(name for name in remaining if _has_sums_in_16_bits(fine, name)):
        explained[f"the error of {_listed(of)} is no larger than that of sums in 16 bits: add up in float32"] = of
    return explained


def _comparisons(
    wrong: WrongGradients, problem: BackwardCall, batch: int, *, in_bad_rows: bool = False
) -> tuple[GradientComparison, GradientComparison]:
    """A coarse one and a fine one."""
    counts = FEWEST_SCORES, MAX_SCORES[wrong.inputs.q.device.type]
    places = (_places(wrong, batch, count, in_bad_rows=in_bad_rows) for count in counts)
    coarse, fine = (GradientComparison.of(wrong, problem, each, in_bad_rows=in_bad_rows) for each in places)
    return coarse, fine


def _is_partly_right(wrong: WrongGradients, name: str) -> bool:
    return float(_bad_rows(wrong.written[name], wrong.truths[name]).double().mean()) <= MOST_BAD_ROWS


def _rows_text(wrong: WrongGradients, names: Iterable[str]) -> str:
    """Which rows of gradients are wrong, behind the words of a mistake."""
    places = {
        name: _place(name, _bad_rows(wrong.written[name], wrong.truths[name])[..., None].expand_as(wrong.written[name]))
        for name in names
    }
    return f", in {_listed(dict.fromkeys(places.values()))}"


class Compared(NamedTuple):
    """What mistakes are fitted to."""

    coarse: GradientComparison
    fine: GradientComparison
    names: list[str]  # of the gradients that are not explained yet
    wrong: WrongGradients


def _listed_mistakes(compared: Compared) -> Iterator[GradientMistake]:
    return backward_mistakes(compared.fine.predictor.problem)


def _fitted_mistakes(compared: Compared) -> Iterator[GradientMistake]:
    """Mistakes that follow from the gradients themselves."""
    comparison = compared.fine
    for name in compared.names:
        written = comparison.written[name].double()
        yield from lost_ranges(name, written, comparison.predictor)
        yield from _copies(comparison, name)
        yield from _moved(comparison, name)
        yield from _partly_zero(comparison, name, compared.wrong)
    yield from _factors(comparison, compared.names)


def _pairs_of_mistakes(compared: Compared) -> Iterator[GradientMistake]:
    """Mistakes whose results are multiplied by a wrong factor, too."""
    problem = compared.coarse.predictor.problem
    factors = [each for each in wrong_factors(problem) if each.factor]
    for mistake in backward_mistakes(problem):
        names = [name for name in compared.names if name in mistake.names and mistake.arrange is None]
        gains = {name: compared.coarse.gain(mistake, name) for name in names}
        for words, factor, of in factors:
            if alike := [name for name in names if name in of and math.isclose(gains[name], factor, rel_tol=LIKE_GAIN)]:
                yield mistake._replace(words=f"{mistake.words}, and {words}", names=tuple(alike), factor=factor)


# Kinds of mistakes in the order in which they are tried, first for all rows and then for the wrong ones alone.
Candidates = Callable[[Compared], Iterator[GradientMistake]]
STAGES: tuple[tuple[bool, Candidates], ...] = (
    (False, _listed_mistakes),
    (False, _fitted_mistakes),
    (False, _pairs_of_mistakes),
    (True, _listed_mistakes),
    (True, _fitted_mistakes),
)


def _copies(comparison: GradientComparison, name: str) -> Iterator[GradientMistake]:
    predictor = comparison.predictor
    batch = slice(predictor.places.batch, predictor.places.batch + 1)
    for other in NAMES:
        if (
            other != name
            and other in predictor.truths
            and predictor.truths[other].out.shape == predictor.truths[name].out.shape
        ):
            whole = predictor.truths[other].out[batch]
            words = f"{name} has the values of {other}: look at the pointer of the output"
            yield GradientMistake(words, names=(name,), arrange=lambda _, whole=whole: whole)  # type: ignore[misc]


def _moved(comparison: GradientComparison, name: str) -> Iterator[GradientMistake]:
    """Elements that are written at the places of others."""
    inputs = comparison.predictor.problem.inputs
    tensor = getattr(inputs, INPUT_OF[name])
    for mistake in memory_mistakes(inputs._replace(q=tensor, k=tensor, v=tensor)):
        if mistake.arrange is not None and mistake.change is None:
            words = mistake.words.replace("the output", name).replace(" output ", f" {name} ")
            yield GradientMistake(words, names=(name,), arrange=mistake.arrange)


def _partly_zero(comparison: GradientComparison, name: str, wrong: WrongGradients) -> Iterator[GradientMistake]:
    """Zeros among right values."""
    missing = (wrong.written[name] == 0) & (wrong.truths[name].same_precision != 0)
    if bool(missing.any()):
        batch = slice(comparison.predictor.places.batch, comparison.predictor.places.batch + 1)
        words = f"{name} is 0 in {_place(name, missing)}: never written there, or a zero accumulator is written"
        yield GradientMistake(words, names=(name,), arrange=lambda right: right.masked_fill(missing[batch], 0.0))


def _factors(comparison: GradientComparison, names: list[str]) -> Iterator[GradientMistake]:
    """The right gradients times the factor that fits best; those with the same factor have one mistake."""
    gains: dict[str, list[str]] = {}
    for name in names:
        written, right = comparison.written[name].double(), comparison.truths[name].out
        if (power := float(right.square().sum())) > 0:
            gains.setdefault(f"{float((written * right).sum()) / power:.3g}", []).append(name)
    for gain, alike in gains.items():
        words = f"{gain} times the right values in {{}}: look at the factors, and at P if it is in all of them"
        yield GradientMistake(words, names=tuple(alike), arrange=lambda right, gain=gain: float(gain) * right)  # type: ignore[misc]


def _has_sums_in_16_bits(fine: GradientComparison, name: str) -> bool:
    """Whether a gradient has an error that sums in its dtype cause, if they are rounded after some of their terms."""
    written, truth = fine.written[name], fine.truths[name]
    by_step = [fine.predictor.summed_by(partial(_rounded_sums, step), name) for step in (STEP, 1)]
    least = min(rms(each - truth.out) for each in by_step)
    allowed = truth._replace(same_precision=by_step[1])
    is_large = rms(written.double() - truth.out) >= MIN_OF_SUMS * least
    return is_large and check_output(written, allowed, "same_precision").passed


def _rounded_sums(step: int, each: Pass) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return partial(accumulated, dtype=each.inputs.output_dtype, step=step)


# -- choice -----------------------------------------------------------------------------------------------------------


def _causes(
    coarse: GradientComparison,
    fine: GradientComparison,
    mistakes: Iterator[GradientMistake],
    names: list[str],
    stop_at: float,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The words of mistakes that explain gradients, with the names of those; each gradient is explained once."""
    fits: dict[str, list[tuple[GradientMistake, Truth]]] = {name: [] for name in names}
    for mistake, name in itertools.product(mistakes, names):
        if time.monotonic() > stop_at:
            return
        if name in mistake.names and coarse.may_fit(mistake, name) and (result := fine.fit(mistake, name)):
            fits[name].append((mistake, result))
    best = {name: _best(fine.written[name], each) for name, each in fits.items()}
    while any(best.values()):
        causes = sorted(_merged(fine, best), key=lambda cause: (-len(cause.names), not cause.is_complete))
        first = causes[0]
        alike = [each.words for each in causes if each[1:] == first[1:]]
        yield "; or ".join(list(dict.fromkeys(alike))[:MAX_NAMES]), first.names
        best = {name: each for name, each in best.items() if name not in first.names}


def _best(written: torch.Tensor, fits: list[tuple[GradientMistake, Truth]]) -> list[GradientMistake]:
    """The mistakes that a gradient does not tell from any other, or prefers to it."""
    return [
        mistake
        for mistake, result in fits
        if all(
            are_same(written, result.out, other.out) or is_at(written, result.out, other.out, beyond=BEYOND)
            for _, other in fits
            if other is not result
        )
    ]


def _merged(fine: GradientComparison, best: Mapping[str, list[GradientMistake]]) -> Iterator[Cause]:
    """Each mistake once, with the gradients that it explains."""
    mistakes = {id(mistake): mistake for each in best.values() for mistake in each}
    for mistake in mistakes.values():
        names = tuple(name for name, each in best.items() if any(mistake is other for other in each))
        others = (name for name in mistake.names if name in fine.truths and name not in names)
        yield Cause(mistake, names, not any(fine.changes(mistake, name) for name in others))
