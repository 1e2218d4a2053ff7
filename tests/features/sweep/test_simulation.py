"""A whole sweep on recorded times: it confirms no luck, and finds the fastest configuration that is right."""

from __future__ import annotations

import random
import statistics

import pytest

from pytest_fa.features.sweep.finals import MIN_ROUNDS, NONE, end_sweep, ranked
from pytest_fa.features.sweep.plugin import SamplerName
from pytest_fa.features.sweep.search import GateAnswer, run_trial
from pytest_fa.features.sweep.suggest import Space, Suggester, key_of
from pytest_fa.features.sweep.sweep_space import Point, Sweep, point_text
from pytest_fa.features.sweep.trial_result import ROUNDS, SweepEnd, SweepTrial, TrialOutcome, TrialResult
from tests.features.sweep.simulated import DEFINES, SHAPE, SIXTY, Effect, RecordedBench, in_memory

pytest.importorskip("optuna")

TWO_HUNDRED = Sweep({"M": tuple(range(20)), "N": tuple(range(10))})
EQUAL: Effect = lambda _: 0.0  # noqa: E731  # short
RACY: Point = {"M": 48, "N": 2, "MODE": "B"}


def swept(
    sweep: Sweep, bench: RecordedBench, seed: int, budget: int = 1000, sampler: SamplerName = "tpe"
) -> tuple[list[SweepTrial], SweepEnd]:
    """All trials of a sweep, and its end."""
    study, suggester = in_memory(sweep), Suggester(Space(sweep, DEFINES), budget, sampler, seed)
    while run_trial(study, suggester, bench, budget):
        pass
    trials = study.trials()
    return trials, end_sweep(trials, bench, sweep.counters, seed, lambda _: None, lambda _: None)


def rugged(sweep: Sweep, seed: int) -> Effect:
    """True ratios of -15 % to 15 %: an effect of each value, and one of each combination."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    of_value = {(name, value): draw.gauss(0, 0.05) for name, values in sweep.values.items() for value in values}
    of_point = {key_of(point): draw.gauss(0, 0.005) for point in Space(sweep, DEFINES).points}
    return lambda point: sum(of_value[pair] for pair in point.items()) + of_point[key_of(point)]


@pytest.fixture(scope="module")
def null_ends() -> list[SweepEnd]:
    """The ends of 20 sweeps over 200 configurations that are as fast as the parent."""
    return [swept(TWO_HUNDRED, RecordedBench(EQUAL, seed), seed)[1] for seed in range(20)]


@pytest.mark.nightly
def test_luck_is_not_confirmed(null_ends: list[SweepEnd]) -> None:
    """Of 20 sweeps over 200 configurations that are as fast as the parent, at least 19 find none better."""
    ends = null_ends
    assert sum(end.winner is None and end.reason.startswith(NONE) for end in ends) >= 19
    assert {200} == {end.timed for end in ends}
    # The search itself is fooled: in each sweep its best configuration looks faster than the parent.
    assert all(min(each.searched for each in end.finalists) < -0.003 for end in ends)


def test_the_expected_luck_is_what_the_search_had(null_ends: list[SweepEnd]) -> None:
    """The expected luck that is shown is near the mean of what the best of 200 equal configurations gained."""
    gains = [-min(each.searched for each in end.finalists) for end in null_ends]
    shown = statistics.fmean(end.luck or 0.0 for end in null_ends)
    assert 0.6 < shown / statistics.fmean(gains) < 1.7


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sampler", "budget", "seeds"), [("tpe", 60, 12), ("tpe", 30, 1), ("nsga2", 40, 4)], ids=["all", "tpe", "nsga2"]
)
def test_the_regret_is_small(sampler: SamplerName, budget: int, seeds: int) -> None:
    """What is gated takes at most 0.2 % longer than the fastest configuration of an exhaustive search, in the mean."""
    regrets = []
    for seed in range(seeds):
        effect = rugged(SIXTY, seed)
        _, end = swept(SIXTY, RecordedBench(effect, seed), seed, budget, sampler)
        assert end.gated is not None
        regrets.append(effect(end.gated) - min(map(effect, Space(SIXTY, DEFINES).points)))
    assert statistics.fmean(regrets) <= (0.002 if budget == 60 else 0.01)


def test_a_real_gain_is_confirmed() -> None:
    """A configuration that is 8 % faster wins, with the ratio of the gate and not with that of the search."""
    fast = {"M": 64, "N": 3, "MODE": "C"}
    _, end = swept(SIXTY, RecordedBench(lambda point: -0.08 if point == fast else 0.02, 1), 1)
    assert (fast, "PASS") == (end.winner, end.gate_verdict)
    assert 0.92 == pytest.approx(end.ratios[0].ratio, abs=0.01)


def test_a_finalist_that_is_clearly_slower_is_given_up() -> None:
    """It is timed twice again.  Those that the noise does not tell from the best one are timed six times."""
    points = Space(SIXTY, DEFINES).points
    fast = [key_of(point) for point in points[:3]]
    bench = RecordedBench(lambda point: -0.1 if key_of(point) in fast else 0.1, 4)
    trials, end = swept(SIXTY, bench, 4)
    rounds = {key_of(each.point): len(each.again) for each in end.finalists}
    assert {ROUNDS} == {rounds[key] for key in fast}
    assert {MIN_ROUNDS} == {number for key, number in rounds.items() if key not in fast}
    assert "PASS" == end.gate_verdict
    assert len(trials) + 3 * ROUNDS + 5 * MIN_ROUNDS == sum(step == "measure" for step, _ in bench.log)


@pytest.mark.parametrize("wrong_at", ["elsewhere", "the third time", "the first time"])
def test_after_a_dismissal_the_next_ones_are_timed_in_full(wrong_at: str) -> None:
    """If the finalist is wrong for which others were given up, they are timed six times before one of them is gated."""
    points = Space(SIXTY, DEFINES).points
    times = 0

    class WrongOnce(RecordedBench):
        def check_unsearched(self, point: Point) -> tuple[int, TrialResult | None]:
            is_wrong = wrong_at == "elsewhere" and point == points[7]
            return 5, TrialResult(TrialOutcome.WRONG, "b2h2s64d64-fp16") if is_wrong else None

        def measure(self, point: Point) -> TrialResult:
            nonlocal times
            times += point == points[7]
            is_wrong = point == points[7] and times == {"the first time": 2, "the third time": 4}.get(wrong_at)
            return TrialResult(TrialOutcome.CRASHED, "in timed calls") if is_wrong else super().measure(point)

    bench = WrongOnce(lambda point: -0.3 if point == points[7] else -0.05 - 0.001 * points.index(point), 5)
    _, end = swept(SIXTY, bench, 5)
    by_point = {key_of(each.point): each for each in end.finalists}
    assert by_point[key_of(points[7])].problem.endswith(("b2h2s64d64-fp16", "in timed calls"))
    assert end.gated is not None
    assert len(by_point[key_of(end.gated)].again) == ROUNDS
    if wrong_at == "the third time":
        assert len(by_point[key_of(points[7])].again) == 2


def test_few_finalists_are_not_given_up_by_few_times() -> None:
    """One or two finalists are timed until their noise is known: two processes say little about it."""
    sweep = Sweep({"M": (1, 2)})
    _, end = swept(sweep, RecordedBench(lambda point: 0.1 * point["M"] if isinstance(point["M"], int) else 0.0, 6), 6)
    assert [4, 4] == [len(each.again) for each in end.finalists]
    _, end = swept(Sweep({"M": (1,)}), RecordedBench(lambda _: 0.1, 6), 6)
    assert [ROUNDS] == [len(each.again) for each in end.finalists]


def test_finals_end_early_if_all_are_slower_than_the_parent() -> None:
    """If every configuration is clearly slower, each finalist is timed twice again, and none is gated."""
    bench = RecordedBench(lambda _: 0.1, 6)
    _, end = swept(SIXTY, bench, 6)
    assert {MIN_ROUNDS} == {len(each.again) for each in end.finalists}
    assert end.reason.startswith(f"{NONE}: timed again, the best one takes 1.")
    assert end.gated is None


def test_a_racy_configuration_never_wins() -> None:
    """A configuration that is twice as fast and wrong is judged, recorded, never timed, and never a finalist."""
    bench = RecordedBench(lambda point: -0.7 if point == RACY else 0.0, 3, wrong=lambda point: point == RACY)
    trials, end = swept(SIXTY, bench, 3)
    assert ["check"] == [step for step, text in bench.log if text == point_text(RACY)]
    assert ["wrong"] == [each.result.outcome for each in trials if each.point == RACY and each.result]
    assert RACY not in [each.point for each in end.finalists]
    assert end.winner is None


def test_what_is_wrong_only_elsewhere_does_not_win() -> None:
    """The fastest finalist is wrong at a shape that was not searched: the next one is gated, and the reason is kept."""
    points = Space(SIXTY, DEFINES).points

    class WrongElsewhere(RecordedBench):
        def check_unsearched(self, point: Point) -> tuple[int, TrialResult | None]:
            return 5, TrialResult(TrialOutcome.WRONG, "b2h2s64d64-fp16") if point == points[7] else None

    ratios = {key_of(points[7]): -0.2, key_of(points[9]): -0.1}
    _, end = swept(SIXTY, WrongElsewhere(lambda point: ratios.get(key_of(point), 0.0), 5), 5)
    assert points[9] == end.winner
    (problem,) = [each.problem for each in end.finalists if each.problem]
    assert "wrong: b2h2s64d64-fp16" == problem


def test_what_is_wrong_while_it_is_timed_elsewhere_does_not_win() -> None:
    """A finalist whose timed calls are wrong at an unsearched shape is dismissed, and the next one is gated."""
    points = Space(SIXTY, DEFINES).points

    class WrongInTimedCalls(RecordedBench):
        def measure_unsearched(self, point: Point) -> dict[str, float] | TrialResult:
            return TrialResult(TrialOutcome.WRONG, "max error in timed calls") if point == points[7] else {SHAPE: -0.1}

    ratios = {key_of(points[7]): -0.2, key_of(points[9]): -0.1}
    bench = WrongInTimedCalls(lambda point: ratios.get(key_of(point), 0.0), 5)
    _, end = swept(SIXTY, bench, 5)
    assert (points[9], {SHAPE: -0.1}) == (end.winner, end.unsearched)
    assert [point_text(points[9])] == [text for step, text in bench.log if step == "gate"]
    assert ["wrong: max error in timed calls"] == [each.problem for each in end.finalists if each.problem]


def test_an_end_says_that_all_faster_ones_are_wrong_elsewhere() -> None:
    """If every faster finalist is dismissed, the end says so, and not that the best one is faster."""

    class WrongElsewhere(RecordedBench):
        def check_unsearched(self, point: Point) -> tuple[int, TrialResult | None]:
            return 5, TrialResult(TrialOutcome.WRONG, point_text(point))

    fast = Space(SIXTY, DEFINES).points[7]
    bench = WrongElsewhere(lambda point: -0.2 if point == fast else 0.1, 5)
    _, end = swept(SIXTY, bench, 5)
    why = "no finalist that is faster is right where it was not searched"
    assert (f"{NONE}: {why}", None) == (end.reason, end.winner)


def test_a_slower_finalist_hides_no_faster_one() -> None:
    """A finalist that is slower than the parent is not gated, although the counters would put it first."""
    points: dict[int, Point] = {0: {"M": 16}, 1: {"M": 128}}
    again = {"M=16": 0.001, "M=128": -0.001}

    class Exact(RecordedBench):
        def measure(self, point: Point) -> TrialResult:
            sign = self._random.choice((-1, 1))
            return TrialResult(TrialOutcome.RIGHT, log_ratio=again[point_text(point)] + 0.0005 * sign)

        def gate(self, point: Point) -> GateAnswer:
            return GateAnswer("PASS", point_text(point), ())

    def trial(number: int) -> SweepTrial:
        result = TrialResult(TrialOutcome.RIGHT, log_ratio=0.0, counters={"registers_per_thread": 64 + 64 * number})
        return SweepTrial(number, "ended", points[number], result=result)

    end = end_sweep([trial(0), trial(1)], Exact(EQUAL, 1), ("registers_per_thread",), 1, lambda _: None, lambda _: None)
    assert points[1] == end.winner


def test_equal_machine_code_is_one_trial() -> None:
    """Configurations with the machine code of another one, or of the parent, are stored without a run."""
    bench = RecordedBench(EQUAL, 0, code_of=lambda point: "the parent's" if point["M"] == 16 else f"{point['M']}")
    trials, end = swept(SIXTY, bench, 0, budget=60)
    assert 4 == end.timed == sum(trial.is_counted for trial in trials)
    assert {"same_code": 56, "right": 4} == {
        name: sum(each.result is not None and each.result.outcome == name for each in trials)
        for name in ("same_code", "right")
    }
    timed = [each for each in trials if each.is_right]
    twins = [each for each in trials if not each.is_right and each.point["M"] != 16]
    assert {each.number for each in timed} == {each.result.same_as for each in twins if each.result}


def test_counters_decide_within_the_noise() -> None:
    """Of finalists whose times differ by less than the noise, the one with fewer registers is first."""
    bench = RecordedBench(lambda point: 0.02 * (point["N"] == 4), 2)
    trials, end = swept(SIXTY, bench, 2)
    by_number = {each.number: each for each in trials}
    first = ranked(end.finalists, by_number, ("registers_per_thread",), 1.0)[0]
    result = by_number[first.number].result
    assert result is not None
    registers = [each.result.counters["registers_per_thread"] for each in trials if each.result]
    finalist_registers = [registers[each.number] for each in end.finalists]
    assert min(finalist_registers) == result.counters["registers_per_thread"]
    fastest = min(end.finalists, key=lambda each: statistics.fmean(each.again))
    assert fastest == ranked(end.finalists, by_number, ("registers_per_thread",), 0.0)[0]
    assert fastest == ranked(end.finalists, by_number, (), 1.0)[0]
