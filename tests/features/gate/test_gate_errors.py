"""Simulated gates are rarely wrong and often decide, under every noise model.

4,000 gates of each kind run; the nightly run has 100,000 and compares the table in docs/explanation/gate.md.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from pytest_fa.features.gate.decision import ANALYSES, analyse
from pytest_fa.records.paired import PairSamples
from tests.features.gate.gate_errors import (
    FAIL,
    INCONCLUSIVE,
    PAGE,
    PASS,
    RATIO,
    NoiseModel,
    SimulatedGates,
    noise_models,
    page_with_table,
    simulate,
    verdicts,
)

GATES = 4000
MAX_WRONG = 0.01
# More wrong verdicts than this occur in less than 1 of 10,000 runs, if the error rate is 1 %.
MAX_COUNTED = int(stats.binom.isf(1e-4, GATES, MAX_WRONG))
MODELS = noise_models()
NAMES = {"PASS": PASS, "FAIL": FAIL, "INCONCLUSIVE": INCONCLUSIVE}


def wrong(gates: SimulatedGates, share: float | None = None) -> int:
    """How many gates at their own ratio end with PASS or FAIL."""
    return int(np.count_nonzero(verdicts(gates, share=share) != INCONCLUSIVE))


@pytest.mark.parametrize("pairs", [1, 4])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_equal_kernels_are_rarely_decided(model: NoiseModel, pairs: int) -> None:
    """If the true ratio is the gate's own, at most 1 % of the gates end with PASS or FAIL."""
    assert wrong(simulate(model, GATES, pairs)) <= MAX_COUNTED


@pytest.mark.parametrize("name", ["two groups, 50:50", "recorded on the H200"])
def test_half_of_the_known_spread_is_too_little(name: str) -> None:
    """The test above detects a gate that trusts half of the known standard deviation: it is wrong too often."""
    assert wrong(simulate(MODELS[name], GATES, 1), share=0.5) > GATES * MAX_WRONG


@pytest.mark.parametrize("pairs", [1, 4])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_differences_are_decided(model: NoiseModel, pairs: int) -> None:
    """A difference of 3 % is decided in 99 % of the gates; 1 % in 70 % on one shape; the verdict is never wrong."""
    gates = simulate(model, GATES, pairs)
    for difference, right in ((-0.03, PASS), (0.03, FAIL), (-0.01, PASS), (0.01, FAIL)):
        decided = verdicts(gates, difference)
        least = 0.99 if abs(difference) > 0.02 else (0.7 if pairs == 1 else 0.25)
        assert np.mean(decided == right) >= least
        assert not np.any(decided == -right)


@pytest.mark.nightly
@pytest.mark.parametrize("pairs", [1, 4])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_many_gates_at_once_are_decided_as_one(model: NoiseModel, pairs: int) -> None:
    """The simulation has the verdicts of `analyse`, also if the A/A control of some gates is too noisy."""
    gates = simulate(model, 120, pairs, seed=pairs)
    gates.control[::4] += 0.011
    for difference in (0.0, -0.008, 0.008):
        expected = [NAMES[_verdict(gates, number, difference)] for number in range(len(gates.means))]
        assert verdicts(gates, difference).tolist() == expected


def _verdict(gates: SimulatedGates, number: int, difference: float) -> str:
    """The verdict of one gate, as the tool decides it."""
    means = gates.means[number] + np.log1p(difference)
    for count in ANALYSES:
        pairs = [
            PairSamples("s", "b", tuple((mean,) for mean in row[:count]), tuple((mean,) for mean in control[:count]))
            for row, control in zip(means, gates.control[number], strict=True)
        ]
        analysis = analyse(pairs, RATIO, is_last=count == ANALYSES[-1], process_sd=gates.known_sd)
        if analysis.verdict:
            return analysis.verdict
    raise AssertionError("the last analysis must have a verdict")


@pytest.mark.nightly
def test_the_page_has_this_table() -> None:
    """The table in docs/explanation/gate.md is the one that `python -m tests.features.gate.gate_errors` writes."""
    text = PAGE.read_text(encoding="utf-8")
    assert page_with_table(text) == text
