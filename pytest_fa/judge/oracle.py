"""What an output is judged by, whatever it is that a case computes."""

from __future__ import annotations

from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.variant import Rounding
from pytest_fa.judge.policies import READS_SPREAD
from pytest_fa.judge.scores import make_scores_truth
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.run.inputs import Inputs


def truth_of(computes: Computes, inputs: Inputs, rounds: tuple[Rounding, ...], policy: str) -> Truth:
    """Truth and same-precision reference with what `policy` reads; `rounds` are a manifest's, which scores have none of."""
    if computes == "scores":
        return make_scores_truth(inputs)
    return make_truth(inputs, rounds, with_spread=policy in READS_SPREAD)
