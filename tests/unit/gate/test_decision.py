"""Gates with known truth: how often they are right, wrong, and silent."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from pytest_fa.gate.decision import ANALYSES, analyse, noise_band
from pytest_fa.records.gated import PairSamples

BLOCKS = 8
PROCESS_SD = 0.008  # of process means
BLOCK_SD = 0.003
POSITION_BIAS = 0.001
SAME_SD = 0.0006  # of a baseline against itself, between processes


def pair(log_ratio: float, draw: np.random.Generator, processes: int = ANALYSES[-1]) -> PairSamples:
    """A pair of this true ratio, with the noise of an NVIDIA H200: skewed process means, position bias, drift."""
    spread = draw.choice([-1, 1]) * (draw.gamma(2, 1, processes) - 2) / math.sqrt(2)  # skewed, of no known side
    means = log_ratio + PROCESS_SD * spread + POSITION_BIAS * draw.choice([-1, 1], processes)
    drift = np.linspace(-1, 1, BLOCKS) * 2e-4  # what ABBA leaves of it
    blocks = means[:, None] + drift + draw.normal(0, BLOCK_SD, (processes, BLOCKS))
    control = draw.normal(0, SAME_SD, processes)[:, None] + POSITION_BIAS * draw.choice([-1, 1], (processes, 1))
    control = control + draw.normal(0, BLOCK_SD / 2, (processes, BLOCKS))
    return PairSamples("b1h8s512d64-fp16", "sdpa", tuple(map(tuple, blocks)), tuple(map(tuple, control)))


def first(whole: PairSamples, count: int) -> PairSamples:
    """The first processes of a pair."""
    return PairSamples(whole.shape_id, whole.baseline, whole.blocks[:count], whole.control[:count])


def gate(pairs: list[PairSamples], ratio: float) -> tuple[str, int]:
    """The verdict and how many processes it took."""
    for count in ANALYSES:
        found = analyse([first(each, count) for each in pairs], ratio, is_last=count == ANALYSES[-1])
        if found.verdict:
            return found.verdict, count
    raise AssertionError("the last look has a verdict")


def verdicts(difference: float, gates: int, ratio: float = 1.0, shapes: int = 1) -> Counter[str]:
    """Gates whose true ratio lies so far from the gate on every shape."""
    draw = np.random.default_rng(20)
    log_ratio = math.log(ratio * (1 + difference))
    return Counter(gate([pair(log_ratio, draw) for _ in range(shapes)], ratio)[0] for _ in range(gates))


def test_equal_kernels_are_rarely_decided() -> None:
    """4,000 gates exactly at the ratio: at most 2.7 % decide either way."""
    found = verdicts(0.0, 4000)
    assert (found["PASS"] + found["FAIL"]) / 4000 <= 0.027


@pytest.mark.parametrize(
    ("difference", "right", "power"),
    [(-0.03, "PASS", 0.99), (0.03, "FAIL", 0.99), (-0.015, "PASS", 0.9), (0.015, "FAIL", 0.9), (-0.01, "PASS", 0.5)],
)
def test_differences_are_decided(difference: float, right: str, power: float) -> None:
    """1,000 gates each: 3 % is decided nearly always, 1 % at least half the time; wrong verdicts are below 0.5 %."""
    found = verdicts(difference, 1000)
    wrong = {"PASS": "FAIL", "FAIL": "PASS"}[right]
    assert (found[right] >= power * 1000, found[wrong] <= 5) == (True, True), found


def test_several_shapes_do_not_add_errors() -> None:
    """1,000 gates over four shapes exactly at the ratio: FAIL stays as rare as for one, PASS is next to impossible."""
    found = verdicts(0.0, 1000, shapes=4)
    assert (found["FAIL"] <= 35, found["PASS"] <= 1) == (True, True), found


def test_one_slow_shape_fails() -> None:
    """Three shapes far below the gate do not hide one above it."""
    draw = np.random.default_rng(3)
    pairs = [pair(math.log(ratio), draw) for ratio in (0.8, 0.8, 0.8, 1.05)]
    assert gate(pairs, 0.95)[0] == "FAIL"


def test_the_sign_is_right() -> None:
    """A candidate of 0.9 times its baseline passes a gate of 0.95, one of 1.0 fails it."""
    draw = np.random.default_rng(4)
    assert [gate([pair(math.log(ratio), draw)], 0.95)[0] for ratio in (0.9, 1.0)] == ["PASS", "FAIL"]


def test_three_percent_needs_one_look() -> None:
    """A difference of 3 % is decided at 6 processes in at least 95 of 100 gates."""
    draw = np.random.default_rng(5)
    counts = Counter(gate([pair(0.03, draw)], 1.0)[1] for _ in range(100))
    assert counts[ANALYSES[0]] >= 95


def test_processes_in_two_groups_do_not_decide_by_luck() -> None:
    """Two equal groups 1.6 % apart, 2,000 gates at the ratio: six processes of one group are no evidence."""
    draw = np.random.default_rng(8)
    found: Counter[str] = Counter()
    for _ in range(2000):
        means = draw.choice([-0.008, 0.008], ANALYSES[-1]) + draw.normal(0, 0.001, ANALYSES[-1])
        rows = tuple((mean,) * BLOCKS for mean in means)
        found[gate([PairSamples("s", "b", rows, ((0.0,) * BLOCKS,) * ANALYSES[-1])], 1.0)[0]] += 1
    assert found["INCONCLUSIVE"] >= 0.96 * 2000, found


def test_a_throttled_stretch_does_not_decide() -> None:
    """Three of twelve processes in which the candidate ran 5 % slower: equal kernels are not called slower."""
    draw = np.random.default_rng(9)
    found: Counter[str] = Counter()
    for _ in range(300):
        plain = pair(0.0, draw)
        slow = tuple(tuple(x + 0.05 for x in row) if 4 <= index < 7 else row for index, row in enumerate(plain.blocks))
        found[gate([PairSamples("s", "b", slow, plain.control)], 1.0)[0]] += 1
    assert found["FAIL"] <= 6, found


def test_a_baseline_unlike_itself_decides_nothing() -> None:
    """Where the baseline differs from itself by 2 %, a difference near it has no verdict, and the reason says so."""
    draw = np.random.default_rng(6)
    good = pair(-0.07, draw)
    bad = PairSamples(
        good.shape_id, good.baseline, good.blocks, tuple(tuple(x + 0.02 for x in row) for row in good.control)
    )
    found = analyse([bad], 0.95, is_last=True)
    assert (found.verdict, "machine too noisy: sdpa against itself" in found.reason) == ("INCONCLUSIVE", True)


@pytest.mark.parametrize(("log_ratio", "verdict"), [(-0.9, "PASS"), (-0.06, "INCONCLUSIVE"), (0.2, "INCONCLUSIVE")])
def test_noise_that_could_not_change_it_leaves_a_pass(log_ratio: float, verdict: str) -> None:
    """A baseline 3 % off itself says nothing about 2 % below the gate, and cannot explain half the time away."""
    draw = np.random.default_rng(7)
    quiet = pair(log_ratio, draw)
    noisy = PairSamples("s", "sdpa", quiet.blocks, tuple(tuple(each + 0.03 for each in row) for row in quiet.control))
    found = analyse([quiet, noisy], 0.95, is_last=True)
    assert found.verdict == verdict
    assert "machine too noisy: sdpa against itself at s is +2." in found.reason


def test_the_noise_band_follows_the_gate() -> None:
    """At 0.95 the baseline may seem 1.25 % off itself, near 1 half a percent."""
    assert [noise_band(0.95), noise_band(1.0)] == pytest.approx([0.0125, 0.005])


@pytest.mark.parametrize("row", [(), (math.nan,) * 8])
def test_a_process_without_figures_decides_nothing(row: tuple[float, ...]) -> None:
    """A process whose blocks were dropped, or are not numbers, leaves the gate open."""
    draw = np.random.default_rng(7)
    good = pair(-0.2, draw)
    found = analyse([PairSamples("s", "b", (row, *good.blocks[1:]), good.control)], 0.95, is_last=True)
    assert found.verdict == "INCONCLUSIVE"


def test_dropped_processes_end_the_gate_at_once() -> None:
    """A process without blocks will have none later: no more are started, and the reason says why."""
    good = pair(-0.2, np.random.default_rng(7))
    found = analyse([PairSamples("s", "b", ((), *good.blocks[1:]), ((), *good.control[1:]))], 0.95, is_last=False)
    assert (found.verdict, "slowed down in 1 processes" in found.reason) == ("INCONCLUSIVE", True)


def test_no_pairs_decide_nothing() -> None:
    """Nothing measured is no success."""
    assert analyse([], 0.95, is_last=True).verdict == "INCONCLUSIVE"
