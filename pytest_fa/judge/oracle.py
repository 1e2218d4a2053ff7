"""Select the truth of what a case computes: attention, scores, or the gradient of q."""

from __future__ import annotations

from pytest_fa.attention.backward import GRADIENTS
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.gradients import truth_of_gradients
from pytest_fa.judge.policies import READS_SPREAD
from pytest_fa.judge.scores import make_scores_truth
from pytest_fa.judge.truth import Truth, make_truth


def truth_of(computes: Computes, inputs: Inputs, rounds: tuple[Rounding, ...], policy: str) -> Truth:
    """Compute truth and the same-precision reference of a case.

    `rounds` are the extra roundings that the manifest declares; of these, scores have only `tf32`.  `policy` decides
    whether the truth includes the spread of P's rounding error.
    """
    if computes == "gradients":
        return truth_of_gradients(inputs, rounds)[GRADIENTS[0]]
    if computes == "scores":
        return make_scores_truth(inputs, tf32="tf32" in rounds)
    return make_truth(inputs, rounds, with_spread=policy in READS_SPREAD)
