"""The end of a sweep: the best configurations are timed again, and one of them is gated against the parent.

The search picks the luckiest of many measurements, so its figures are never quoted.  The best configurations are timed
again in new processes, interleaved.  The best of these is checked where it was not searched, and gated once.  Only a
gate that passes makes a winner.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import msgspec

from pytest_fa.features.sweep.luck import degrees_of_freedom, expected_largest, pooled_sd
from pytest_fa.features.sweep.search import Bench
from pytest_fa.features.sweep.sweep_space import Fitness, Point, point_text
from pytest_fa.features.sweep.trial_result import ROUNDS, Finalist, SweepEnd, SweepTrial, TrialResult

FINALISTS = 8
MIN_ROUNDS = 2  # before a finalist may be given up
MIN_FREEDOM = 6  # degrees of freedom of the noise before a finalist may be given up
CLEARLY_SLOWER = 4.0  # standard errors of a difference, beyond which a finalist is given up
NONE = "no configuration is better than the parent"


def end_sweep(
    trials: Sequence[SweepTrial],
    bench: Bench,
    counters: tuple[Fitness, ...],
    seed: int,
    say: Callable[[str], object],
    begin_gate: Callable[[Point], object],
) -> SweepEnd:
    """Time the finalists again, check and gate the best one, and return how the sweep ends.

    `begin_gate` is called before the one gate; what it raises prevents the gate.
    """
    timed = [trial for trial in trials if trial.is_right]
    if not timed:
        return SweepEnd(f"{NONE}: no configuration is correct and could be timed", 0)
    by_number, has_dismissed = {trial.number: trial for trial in timed}, False
    order = random.Random(seed)  # noqa: S311  # no secret
    end = _timed_again(SweepEnd(NONE, len(timed), finalists=_first_finalists(timed)), bench, order, say)
    while faster := [each for each in end.finalists if not each.problem and _again(each) < 0]:
        finalist = ranked(faster, by_number, counters, end.noise_sd or 0.0)[0]
        checked, unsearched = _checked(finalist.point, bench)
        end = msgspec.structs.replace(end, checked=checked)
        if not isinstance(unsearched, TrialResult):
            return _gated(msgspec.structs.replace(end, unsearched=unsearched), finalist, bench, begin_gate)
        has_dismissed = True
        wrong = msgspec.structs.replace(finalist, problem=f"{unsearched.outcome}: {unsearched.reason}")
        kept = tuple(wrong if each is finalist else each for each in end.finalists)
        end = _timed_again(msgspec.structs.replace(end, finalists=kept), bench, order, say)
    return msgspec.structs.replace(end, reason=f"{NONE}: {_why_none(end.finalists, has_dismissed=has_dismissed)}")


def _checked(point: Point, bench: Bench) -> tuple[int, dict[str, float] | TrialResult]:
    """The number of checks where the configuration was not searched, and its log-ratios there, or its problem."""
    checked, problem = bench.check_unsearched(point)
    return checked, problem or bench.measure_unsearched(point)


def _why_none(finalists: Sequence[Finalist], *, has_dismissed: bool) -> str:
    """Why no finalist was gated.  `has_dismissed` says that one was faster, and wrong where it was not searched."""
    if has_dismissed:
        return "no finalist that is faster is right where it was not searched"
    if timed := [_again(each) for each in finalists if not each.problem]:
        return f"timed again, the best one takes {math.exp(min(timed)):.4f} x the time of the parent"
    return "no finalist could be timed again"


def ranked(
    finalists: Sequence[Finalist],
    trials: dict[int, SweepTrial],
    counters: tuple[Fitness, ...],
    noise_sd: float,
) -> list[Finalist]:
    """The finalists without a problem, the best first.

    Those that the best one does not beat by two standard errors of the difference are ordered by the counters.
    """
    usable = sorted((each for each in finalists if not each.problem), key=_again)
    if not usable or not counters:
        return usable
    best = usable[0]

    def order(finalist: Finalist) -> tuple[float, ...]:
        result = trials[finalist.number].result
        known = result.counters if result else {}
        is_tie = _again(finalist) <= _again(best) + 2 * noise_sd * _error(finalist, best)
        ties = tuple(known.get(name, math.inf) for name in counters) if is_tie else ()
        return (0.0, *ties, _again(finalist)) if ties else (1.0, _again(finalist))

    return sorted(usable, key=order)


def _first_finalists(timed: list[SweepTrial]) -> tuple[Finalist, ...]:
    """The configurations that looked best in the search."""
    ratios = [(each.result.log_ratio, each) for each in timed if each.result and each.result.log_ratio is not None]
    best = sorted(ratios, key=lambda pair: (pair[0], pair[1].number))[:FINALISTS]
    return tuple(Finalist(trial.number, trial.point, ratio) for ratio, trial in best)


def _timed_again(end: SweepEnd, bench: Bench, order: random.Random, say: Callable[[str], object]) -> SweepEnd:
    """The end with new times of its finalists, the noise between them, and the expected luck.

    In each round, one process times each finalist that may win, in an order that `order` draws.
    """
    finalists = list(end.finalists)
    while places := _that_may_win(finalists):
        turn = 1 + min(len(finalists[place].again) for place in places)
        say(f"sweep: timing {len(places)} finalist{'s' * (len(places) != 1)} again, {turn} of {ROUNDS}")
        for place in order.sample(places, len(places)):
            result = bench.measure(finalists[place].point)
            finalists[place] = (
                msgspec.structs.replace(finalists[place], problem=f"{result.outcome}: {result.reason}")
                if result.log_ratio is None
                else msgspec.structs.replace(finalists[place], again=(*finalists[place].again, result.log_ratio))
            )
    noise = pooled_sd([each.again for each in finalists])
    luck = None if noise is None else noise * expected_largest(end.timed)
    return msgspec.structs.replace(end, noise_sd=noise, luck=luck, finalists=tuple(finalists))


def _that_may_win(finalists: Sequence[Finalist]) -> list[int]:
    """The places of the finalists to time once more: not clearly slower than the best one or than the parent."""
    places = [place for place, each in enumerate(finalists) if not each.problem and len(each.again) < ROUNDS]
    if few := [place for place in places if len(finalists[place].again) < MIN_ROUNDS]:
        return few
    times = [each.again for each in finalists]
    if not places or degrees_of_freedom(times) < MIN_FREEDOM:
        return places
    allowed = CLEARLY_SLOWER * (pooled_sd(times) or 0.0)
    best = min((each for each in finalists if not each.problem), key=_again)

    def may_win(each: Finalist) -> bool:
        behind_parent, behind_best = _again(each), _again(each) - _again(best)
        return behind_best <= allowed * _error(each, best) and behind_parent <= allowed / math.sqrt(len(each.again))

    return [place for place in places if may_win(finalists[place])]


def _error(first: Finalist, second: Finalist) -> float:
    """The standard error of the difference of two means, in standard deviations between processes."""
    return math.sqrt(1 / len(first.again) + 1 / len(second.again))


def _again(finalist: Finalist) -> float:
    """The mean log-ratio in the new processes."""
    return statistics.fmean(finalist.again)


def _gated(end: SweepEnd, finalist: Finalist, bench: Bench, begin_gate: Callable[[Point], object]) -> SweepEnd:
    """The end with the gate of this finalist, which decides."""
    begin_gate(finalist.point)
    answer = bench.gate(finalist.point)
    passed = answer.verdict == "PASS"
    gate = f"the gate of {point_text(finalist.point)} against the parent: {answer.verdict}: {answer.reason}"
    return msgspec.structs.replace(
        end,
        reason=gate if passed else f"{NONE}: {gate}",
        winner=finalist.point if passed else None,
        gated=finalist.point,
        gate_verdict=answer.verdict,
        ratios=answer.ratios,
    )
