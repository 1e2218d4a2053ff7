"""Which configuration a sweep tries next: every feasible one if there are few, else what Optuna's samplers suggest.

A sampler works on a copy of the study in memory.  What it suggests is checked there: only feasible configurations that
no trial has are passed on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_fa.features.sweep.optional_optuna import optuna
from pytest_fa.features.sweep.plugin import SamplerName
from pytest_fa.features.sweep.sweep_space import Point, Sweep, feasible_points
from pytest_fa.features.sweep.trial_result import SweepTrial

MAX_ATTEMPTS = 40  # suggestions that are not feasible, or that a trial has, before one is drawn at random
STARTUP_TRIALS = 10  # drawn at random before TPE has a model


class Suggestion(NamedTuple):
    """A configuration, and what the sampler must remember with its trial."""

    point: Point
    sampler_attributes: dict[str, Any]


class Space:
    """The feasible configurations of a sweep, and where each value stands in its list."""

    def __init__(self, sweep: Sweep, defines: Mapping[str, int | str]) -> None:
        self.sweep = sweep
        self.points = feasible_points(sweep, defines)
        self._by_key = {key_of(point): point for point in self.points}

    def untried(self, trials: Sequence[SweepTrial]) -> list[Point]:
        """The configurations that no trial has.  Those of released trials are untried again."""
        tried = {key_of(trial.point) for trial in trials if trial.state != "released"}
        return [point for key, point in self._by_key.items() if key not in tried]


class Suggester:
    """Suggests configurations.  With `budget` trials for all of them, it draws untried ones until none is left."""

    def __init__(self, space: Space, budget: int, sampler: SamplerName, seed: int) -> None:
        self._space, self._budget, self._sampler = space, budget, sampler
        self._random = random.Random(seed)  # noqa: S311  # no secret

    @property
    def tries_all(self) -> bool:
        """Whether the budget suffices for every feasible configuration."""
        return len(self._space.points) <= self._budget

    def next(self, trials: Sequence[SweepTrial], optuna_attributes: Mapping[int, dict[str, Any]]) -> Suggestion | None:
        """The next configuration; None if every feasible one has a trial."""
        untried = self._space.untried(trials)
        if not untried:
            return None
        if not self.tries_all and (suggestion := self._sampled(untried, trials, optuna_attributes)):
            return suggestion
        return Suggestion(self._random.choice(untried), {})

    def _sampled(
        self, untried: list[Point], trials: Sequence[SweepTrial], optuna_attributes: Mapping[int, dict[str, Any]]
    ) -> Suggestion | None:
        scratch = optuna.create_study(sampler=self._new_sampler())
        distributions = self._distributions()
        scratch.add_trials([self._frozen(each, distributions, optuna_attributes) for each in trials if each.is_counted])
        wanted = {key_of(point) for point in untried}
        for _ in range(MAX_ATTEMPTS):
            trial = scratch.ask(distributions)
            point = {name: self._value(name, place) for name, place in trial.params.items()}
            if key_of(point) in wanted:
                frozen = scratch.get_trials(deepcopy=False)[trial.number]
                return Suggestion(point, dict(frozen.system_attrs))
            scratch.tell(trial, state=optuna.trial.TrialState.FAIL)
        return None

    def _new_sampler(self) -> optuna.samplers.BaseSampler:
        seed = self._random.randrange(2**31)
        if self._sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, constant_liar=True)
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(8, min(50, self._budget // 8)))

    def _distributions(self) -> dict[str, Any]:
        """Numbers are passed by their place in their order, so that adjacent values are near; texts are not."""
        kinds = optuna.distributions
        return {
            name: kinds.IntDistribution(0, len(values) - 1)
            if all(isinstance(value, int) for value in values)
            else kinds.CategoricalDistribution(tuple(range(len(values))))
            for name, values in self._space.sweep.values.items()
        }

    def _ordered(self, name: str) -> list[Any]:
        values = self._space.sweep.values[name]
        return sorted(values) if all(isinstance(value, int) for value in values) else list(values)

    def _value(self, name: str, place: int) -> int | str:
        value: int | str = self._ordered(name)[place]
        return value

    def _frozen(
        self, trial: SweepTrial, distributions: dict[str, Any], optuna_attributes: Mapping[int, dict[str, Any]]
    ) -> optuna.trial.FrozenTrial:
        """A trial as the sampler sees it: complete with its ratio, running, or pruned, which counts as worst."""
        states = optuna.trial.TrialState
        ratio = trial.result.log_ratio if trial.result else None
        state = states.RUNNING if trial.state == "running" else states.PRUNED if ratio is None else states.COMPLETE
        return optuna.trial.create_trial(
            state=state,
            value=ratio,
            params={name: self._ordered(name).index(value) for name, value in trial.point.items()},
            distributions=distributions,
            system_attrs=optuna_attributes.get(trial.number, {}),
        )


def key_of(point: Mapping[str, int | str]) -> tuple[tuple[str, int | str], ...]:
    """What two equal configurations share."""
    return tuple(sorted(point.items()))
