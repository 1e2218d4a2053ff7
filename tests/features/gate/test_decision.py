"""Gates on simulated data with a known true ratio: how often the verdict is right, wrong or INCONCLUSIVE."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest

from pytest_fa.features.gate.decision import ANALYSES, analyse, noise_band
from pytest_fa.records.paired import PairSamples

BLOCKS = 8
PROCESS_SD = 0.008  # of process means
BLOCK_SD = 0.003
POSITION_BIAS = 0.001
CONTROL_SD = 0.0006  # of the process means of an A/A control


def pair(log_ratio: float, draw: np.random.Generator, processes: int = ANALYSES[-1]) -> PairSamples:
    """A pair with this true ratio and the noise of an NVIDIA H200: skewed process means, position bias, drift."""
    spread = draw.choice([-1, 1]) * (draw.gamma(2, 1, processes) - 2) / math.sqrt(2)  # skewed to a random side
    means = log_ratio + PROCESS_SD * spread + POSITION_BIAS * draw.choice([-1, 1], processes)
    drift = np.linspace(-1, 1, BLOCKS) * 2e-4  # the part that ABBA blocks do not cancel
    blocks = means[:, None] + drift + draw.normal(0, BLOCK_SD, (processes, BLOCKS))
    control = draw.normal(0, CONTROL_SD, processes)[:, None] + POSITION_BIAS * draw.choice([-1, 1], (processes, 1))
    control = control + draw.normal(0, BLOCK_SD / 2, (processes, BLOCKS))
    return PairSamples("b1h8s512d64-fp16", "sdpa", tuple(map(tuple, blocks)), tuple(map(tuple, control)))


def first(samples: PairSamples, count: int) -> PairSamples:
    """The first `count` processes of a pair."""
    return PairSamples(samples.shape_id, samples.baseline, samples.blocks[:count], samples.control[:count])


def gate(pairs: list[PairSamples], ratio: float) -> tuple[str, int]:
    """The verdict, and the number of processes that it took."""
    for count in ANALYSES:
        analysis = analyse([first(each, count) for each in pairs], ratio, is_last=count == ANALYSES[-1])
        if analysis.verdict:
            return analysis.verdict, count
    raise AssertionError("the last analysis must have a verdict")


def verdicts(difference: float, gates: int, ratio: float = 1.0, shapes: int = 1) -> Counter[str]:
    """The verdicts of many gates at `ratio`, whose true ratio is `ratio * (1 + difference)` on every shape."""
    draw = np.random.default_rng(20)
    log_ratio = math.log(ratio * (1 + difference))
    return Counter(gate([pair(log_ratio, draw) for _ in range(shapes)], ratio)[0] for _ in range(gates))


@pytest.mark.nightly
def test_equal_kernels_are_rarely_decided() -> None:
    """If the true ratio equals the gate's, at most 2.7 % of 4,000 gates end with PASS or FAIL."""
    counts = verdicts(0.0, 4000)
    assert (counts["PASS"] + counts["FAIL"]) / 4000 <= 0.027


@pytest.mark.parametrize(
    ("difference", "right", "power"),
    [(-0.03, "PASS", 0.99), (0.03, "FAIL", 0.99), (-0.015, "PASS", 0.9), (0.015, "FAIL", 0.9), (-0.01, "PASS", 0.5)],
)
def test_differences_are_decided(difference: float, right: str, power: float) -> None:
    """Of 1,000 gates, 99 % decide a difference of 3 % and half one of 1 %; at most 0.5 % have the wrong verdict."""
    counts = verdicts(difference, 1000)
    wrong = {"PASS": "FAIL", "FAIL": "PASS"}[right]
    assert (counts[right] >= power * 1000, counts[wrong] <= 5) == (True, True), counts


@pytest.mark.nightly
def test_several_shapes_do_not_add_errors() -> None:
    """With four shapes at the gate's ratio, FAIL stays as rare as with one shape, and PASS is almost impossible."""
    counts = verdicts(0.0, 1000, shapes=4)
    assert (counts["FAIL"] <= 35, counts["PASS"] <= 1) == (True, True), counts


def test_one_slow_shape_fails() -> None:
    """One shape above the gate's ratio gives FAIL, even if three others are far below it."""
    draw = np.random.default_rng(3)
    pairs = [pair(math.log(ratio), draw) for ratio in (0.8, 0.8, 0.8, 1.05)]
    assert gate(pairs, 0.95)[0] == "FAIL"


def test_the_sign_is_right() -> None:
    """A candidate that takes 0.9 times its baseline's time passes a gate of 0.95; one that takes 1.0 times fails it."""
    draw = np.random.default_rng(4)
    assert [gate([pair(math.log(ratio), draw)], 0.95)[0] for ratio in (0.9, 1.0)] == ["PASS", "FAIL"]


def test_three_percent_needs_one_analysis() -> None:
    """At least 95 of 100 gates decide a difference of 3 % in the interim analysis, after 6 processes."""
    draw = np.random.default_rng(5)
    counts = Counter(gate([pair(0.03, draw)], 1.0)[1] for _ in range(100))
    assert counts[ANALYSES[0]] >= 95


@pytest.mark.nightly
def test_processes_in_two_clusters_do_not_decide_by_chance() -> None:
    """If process means form two clusters 1.6 % apart around the gate's ratio, 96 % of 2,000 gates are INCONCLUSIVE."""
    draw = np.random.default_rng(8)
    counts: Counter[str] = Counter()
    for _ in range(2000):
        means = draw.choice([-0.008, 0.008], ANALYSES[-1]) + draw.normal(0, 0.001, ANALYSES[-1])
        rows = tuple((mean,) * BLOCKS for mean in means)
        counts[gate([PairSamples("s", "b", rows, ((0.0,) * BLOCKS,) * ANALYSES[-1])], 1.0)[0]] += 1
    assert counts["INCONCLUSIVE"] >= 0.96 * 2000, counts


def test_a_throttled_stretch_does_not_decide() -> None:
    """If the candidate ran 5 % slower in three of twelve processes, at most 2 % of gates on equal kernels FAIL."""
    draw = np.random.default_rng(9)
    counts: Counter[str] = Counter()
    for _ in range(300):
        plain = pair(0.0, draw)
        slow = tuple(tuple(x + 0.05 for x in row) if 4 <= index < 7 else row for index, row in enumerate(plain.blocks))
        counts[gate([PairSamples("s", "b", slow, plain.control)], 1.0)[0]] += 1
    assert counts["FAIL"] <= 6, counts


def test_a_noisy_control_prevents_a_verdict() -> None:
    """If the A/A control deviates by 2 %, a difference of similar size has no verdict, and the reason says so."""
    draw = np.random.default_rng(6)
    good = pair(-0.07, draw)
    bad = PairSamples(
        good.shape_id, good.baseline, good.blocks, tuple(tuple(x + 0.02 for x in row) for row in good.control)
    )
    analysis = analyse([bad], 0.95, is_last=True)
    reason = "noisy machine: the A/A control (sdpa against itself"
    assert (analysis.verdict, reason in analysis.reason) == ("INCONCLUSIVE", True)


@pytest.mark.parametrize(("log_ratio", "verdict"), [(-0.9, "PASS"), (-0.06, "INCONCLUSIVE"), (0.2, "INCONCLUSIVE")])
def test_a_clear_pass_stays_on_a_noisy_machine(log_ratio: float, verdict: str) -> None:
    """If the A/A control deviates by 3 %, half the baseline's time still passes, but 1 % below the gate does not."""
    draw = np.random.default_rng(7)
    quiet = pair(log_ratio, draw)
    noisy = PairSamples("s", "sdpa", quiet.blocks, tuple(tuple(each + 0.03 for each in row) for row in quiet.control))
    analysis = analyse([quiet, noisy], 0.95, is_last=True)
    assert analysis.verdict == verdict
    assert "noisy machine: the A/A control (sdpa against itself at s) deviates by +2." in analysis.reason


def test_the_noise_band_follows_the_gate() -> None:
    """The A/A control may deviate by 1.25 % for a gate of 0.95, and by 0.5 % for a gate of 1."""
    assert [noise_band(0.95), noise_band(1.0)] == pytest.approx([0.0125, 0.005])


@pytest.mark.parametrize("row", [(), (math.nan,) * 8])
def test_a_process_without_figures_prevents_a_verdict(row: tuple[float, ...]) -> None:
    """A process without blocks, or with NaN in its blocks, makes the gate INCONCLUSIVE."""
    draw = np.random.default_rng(7)
    good = pair(-0.2, draw)
    analysis = analyse([PairSamples("s", "b", (row, *good.blocks[1:]), good.control)], 0.95, is_last=True)
    assert analysis.verdict == "INCONCLUSIVE"


def test_dropped_processes_end_the_gate_at_once() -> None:
    """A process that lost its blocks ends the gate in the interim analysis, and the reason says why."""
    good = pair(-0.2, np.random.default_rng(7))
    samples = PairSamples("s", "b", ((), *good.blocks[1:]), ((), *good.control[1:]))
    analysis = analyse([samples], 0.95, is_last=False)
    reason = "1 process lost more than 20 % of the blocks"
    assert (analysis.verdict, analysis.reason.startswith(reason)) == ("INCONCLUSIVE", True)


def test_no_pairs_give_no_verdict() -> None:
    """A gate without pairs is INCONCLUSIVE."""
    assert analyse([], 0.95, is_last=True).verdict == "INCONCLUSIVE"


def test_the_interim_analysis_does_not_end_a_gate_whose_clocks_differ() -> None:
    """More processes may let the judge's clock agree."""
    samples = pair(math.log(0.8), np.random.default_rng(3))
    samples = msgspec.structs.replace(samples, outside=(math.log(1.02),) * ANALYSES[0])
    assert analyse([samples], 1.0, is_last=False).verdict is None


@pytest.mark.parametrize(("outside", "verdict"), [(0.81, "PASS"), (1.02, "INCONCLUSIVE"), (1.0, "INCONCLUSIVE")])
def test_a_pass_needs_both_clocks(outside: float, verdict: str) -> None:
    """A ratio that is clearly below the gate by the arms' own clocks passes only if the judge's clock agrees."""
    samples = pair(math.log(0.8), np.random.default_rng(3))
    samples = msgspec.structs.replace(samples, outside=(math.log(outside),) * ANALYSES[-1])
    analysis = analyse([samples], 1.0, is_last=True)
    assert analysis.verdict == verdict
    if verdict != "PASS":
        assert analysis.reason == (
            f"by the judge's clock the ratio is {outside:.4f} at b1h8s512d64-fp16; a PASS needs both clocks"
        )
