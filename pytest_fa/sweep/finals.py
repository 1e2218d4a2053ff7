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

from pytest_fa.catalog.sweep_space import Fitness, Point, point_text
from pytest_fa.sweep.luck import expected_largest, pooled_sd
from pytest_fa.sweep.search import Bench
from pytest_fa.sweep.trial_result import Finalist, SweepEnd, SweepTrial, TrialResult

FINALISTS = 8
ROUNDS = 6  # new processes for each finalist
LEAST_ROUNDS = 2  # before a finalist may be given up
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
        return SweepEnd(f"{NONE}: no configuration is right and could be timed", 0)
    finalists = _timed_again(_first_finalists(timed), bench, seed, say)
    noise = pooled_sd([each.again for each in finalists])
    luck = None if noise is None else noise * expected_largest(len(timed))
    end = SweepEnd(NONE, len(timed), noise_sd=noise, luck=luck, finalists=finalists)
    by_number = {trial.number: trial for trial in timed}
    faster = [each for each in finalists if not each.problem and _again(each) < 0]
    for finalist in ranked(faster, by_number, counters, noise or 0.0):
        checked, unsearched = _checked(finalist.point, bench)
        end = msgspec.structs.replace(end, checked=checked)
        if not isinstance(unsearched, TrialResult):
            return _gated(msgspec.structs.replace(end, unsearched=unsearched), finalist, bench, begin_gate)
        dismissed = msgspec.structs.replace(finalist, problem=f"{unsearched.outcome}: {unsearched.reason}")
        kept = tuple(dismissed if each is finalist else each for each in end.finalists)
        end = msgspec.structs.replace(end, finalists=kept)
    return msgspec.structs.replace(end, reason=f"{NONE}: {_why_none(finalists, faster)}")


def _checked(point: Point, bench: Bench) -> tuple[int, dict[str, float] | TrialResult]:
    """The number of checks where the configuration was not searched, and its log-ratios there, or its problem."""
    checked, problem = bench.check_unsearched(point)
    return checked, problem or bench.measure_unsearched(point)


def _why_none(finalists: Sequence[Finalist], faster: Sequence[Finalist]) -> str:
    """Why no finalist was gated."""
    if faster:
        return f"none of the {len(faster)} finalists that are faster is right where it was not searched"
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
    band = 2 * noise_sd * math.sqrt(2 / len(usable[0].again))
    limit = _again(usable[0]) + band

    def order(finalist: Finalist) -> tuple[float, ...]:
        result = trials[finalist.number].result
        known = result.counters if result else {}
        ties = tuple(known.get(name, math.inf) for name in counters) if _again(finalist) <= limit else ()
        return (0.0, *ties, _again(finalist)) if ties else (1.0, _again(finalist))

    return sorted(usable, key=order)


def _first_finalists(timed: list[SweepTrial]) -> list[Finalist]:
    """The configurations that looked best in the search."""
    ratios = [(each.result.log_ratio, each) for each in timed if each.result and each.result.log_ratio is not None]
    best = sorted(ratios, key=lambda pair: (pair[0], pair[1].number))[:FINALISTS]
    return [Finalist(trial.number, trial.point, ratio) for ratio, trial in best]


def _timed_again(
    finalists: list[Finalist], bench: Bench, seed: int, say: Callable[[str], object]
) -> tuple[Finalist, ...]:
    """The finalists with new times: in each round, one process for each that may still win, in random order."""
    order = random.Random(seed)  # noqa: S311  # no secret
    places = list(range(len(finalists)))
    for number in range(ROUNDS):
        if places:
            say(f"sweep: finalists that may win: {len(places)}; round {number + 1} of {ROUNDS}")
        for place in order.sample(places, len(places)):
            result = bench.measure(finalists[place].point)
            finalists[place] = (
                msgspec.structs.replace(finalists[place], problem=f"{result.outcome}: {result.reason}")
                if result.log_ratio is None
                else msgspec.structs.replace(finalists[place], again=(*finalists[place].again, result.log_ratio))
            )
        places = [place for place in places if not finalists[place].problem]
        if number + 1 >= LEAST_ROUNDS:
            places = _that_may_win(finalists, places)
    return tuple(finalists)


def _that_may_win(finalists: Sequence[Finalist], places: list[int]) -> list[int]:
    """The places of the finalists that are not clearly slower than the best one or than the parent."""
    noise_sd = pooled_sd([finalists[place].again for place in places])
    if noise_sd is None:
        return places
    standard_error = noise_sd / math.sqrt(len(finalists[places[0]].again))
    best = min(_again(finalists[place]) for place in places)
    limit = min(best + CLEARLY_SLOWER * math.sqrt(2) * standard_error, CLEARLY_SLOWER * standard_error)
    return [place for place in places if _again(finalists[place]) <= limit]


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
