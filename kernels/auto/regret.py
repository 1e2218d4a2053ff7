"""How good the choices of `auto` are at problems that no cost is fitted to."""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.catalog.case import parse_case

from .costs import Costs
from .problem import Problem
from .rung_times import SDPA, RungTimes


class Chosen(NamedTuple):
    """The rung that `auto` chooses for a problem, beside the others."""

    problem: Problem
    rung: str
    regret: float  # its time / that of the fastest rung
    to_sdpa: float | None  # its time / that of the fastest backend of SDPA; None if none takes the problem


def choices(times: RungTimes, costs: Costs) -> list[Chosen]:
    """The choice at each timed problem.

    Costs: those that `auto` has on the GPU of the times.  Problems at which the choice or all others were not timed are
    left out.
    """
    found = []
    for shape, us in times.us.items():
        problem = Problem.of(parse_case(f"{shape}-seed0"))
        ranked = [each.rung for each in costs.ranked(problem.coarse())]
        rungs = [rung for rung in ranked if rung in us]
        if len(rungs) > 1 and rungs[0] == ranked[0]:
            chosen_us, fastest_us = us[rungs[0]], min(us[rung] for rung in rungs)
            of_sdpa = [us[name] for name in SDPA if name in us]
            to_sdpa = chosen_us / min(of_sdpa) if of_sdpa else None
            found.append(Chosen(problem, ranked[0], chosen_us / fastest_us, to_sdpa))
    return found
