"""How often a gate is wrong and how often it decides, by simulation.

`python -m tests.features.gate.gate_errors` writes its table into docs/explanation/gate.md, from 100,000 gates a row.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from pytest_fa.features.gate import decision
from pytest_fa.features.gate.decision import ANALYSES, CONFIDENCE, noise_band
from pytest_fa.features.gate.intervals import PROCESS_SD
from pytest_fa.features.gate.noise import Noise, decode_noise
from pytest_fa.records.paired import PairSamples

REPOSITORY = Path(__file__).parents[3]
NOISE = REPOSITORY / "tests" / "recorded" / "profiles" / "nvidia-h200" / "noise.json"
PAGE = REPOSITORY / "docs" / "explanation" / "gate.md"
TABLE = re.compile(r"(<!-- gate-errors -->\n).*(<!-- /gate-errors -->)", re.DOTALL)
RATIO = 0.95  # of the simulated gates
GAP, WITHIN = 0.014, 0.001  # between the two groups of process means, and the standard deviation within each
GATES = 100_000
DIFFERENCES = (-0.01, 0.01)  # of the true ratio from RATIO
PASS, FAIL, INCONCLUSIVE = 1, -1, 0

Draw = Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]  # process means, mean 0


class NoiseModel(NamedTuple):
    """The noise of process means: how it is drawn, and the standard deviation that the gate knows."""

    draw: Draw
    known_sd: float


def _recorded() -> Noise:
    return decode_noise(NOISE.read_bytes())


def _different_pair(noise: Noise) -> PairSamples:
    """The recorded pair of two different backends."""
    return next(pair for pair, name in zip(noise.pairs, noise.candidates, strict=True) if name != pair.baseline)


def _normal(draw: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    return draw.normal(0, PROCESS_SD, shape)


def _skewed(draw: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """A gamma distribution of shape 2, in half of the gates with its long tail below the mean."""
    means: np.ndarray = _side(draw, shape) * PROCESS_SD * (draw.gamma(2, 1, shape) - 2) / math.sqrt(2)
    return means


def _groups(share: float) -> NoiseModel:
    """Two groups of process means; `share` of the processes are in one, in half of the gates the slower one."""

    def draw_means(draw: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
        means: np.ndarray = GAP * ((draw.random(shape) < share) - share)
        means *= _side(draw, shape)
        means += draw.normal(0, WITHIN, shape)
        return means

    return NoiseModel(draw_means, math.hypot(GAP * math.sqrt(share * (1 - share)), WITHIN))


def _side(draw: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    return draw.choice([-1, 1], (shape[0], 1, 1))


def _resampled(values: list[float]) -> Draw:
    centred = np.array(values) - np.mean(values)
    return lambda draw, shape: draw.choice(centred, shape)


def noise_models() -> dict[str, NoiseModel]:
    """The models by the names of the table's rows."""
    noise = _recorded()
    return {
        "normal": NoiseModel(_normal, PROCESS_SD),
        "skewed (gamma)": NoiseModel(_skewed, PROCESS_SD),
        "two groups, 50:50": _groups(0.5),
        "two groups, 70:30": _groups(0.3),
        "recorded on the H200": NoiseModel(_resampled(_different_pair(noise).means), noise.process_sd),
    }


class SimulatedGates(NamedTuple):
    """The process means of many gates at the gate's own ratio, `[gates, pairs, processes]`, and of the A/A control."""

    means: np.ndarray
    control: np.ndarray
    known_sd: float


def simulate(model: NoiseModel, gates: int, pairs: int, seed: int = 20) -> SimulatedGates:
    """Draw gates.  The A/A control has the recorded spread and no bias."""
    draw = np.random.default_rng(seed)
    shape = (gates, pairs, ANALYSES[-1])
    control = _resampled(_different_pair(_recorded()).control_means)
    return SimulatedGates(model.draw(draw, shape) + math.log(RATIO), control(draw, shape), model.known_sd)


def verdicts(gates: SimulatedGates, difference: float = 0.0, share: float | None = None) -> np.ndarray:
    """The verdicts of many gates, `[gates]`, by the rules of `decision.analyse`, which decides one gate at a time.

    `difference` is that of the true ratio from the gate's.  `share` replaces `MIN_SD_SHARE`.
    """
    least_sd = (decision.MIN_SD_SHARE if share is None else share) * gates.known_sd
    result = np.full(len(gates.means), INCONCLUSIVE)
    for count in ANALYSES:
        analysed = _analyse(gates.means[..., :count] + math.log1p(difference), gates.control[..., :count], least_sd)
        result = np.where(result == INCONCLUSIVE, analysed, result)
    return result


def _analyse(means: np.ndarray, control: np.ndarray, least_sd: float) -> np.ndarray:
    pairs, count = means.shape[1:]
    quantile, error = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1), _error(means, least_sd)
    excess = means.mean(axis=-1) - math.log(RATIO)
    deviation = np.abs(control.mean(axis=-1)) + quantile * _error(control, 0.0)
    deviation = np.where(deviation > noise_band(RATIO), deviation, 0.0).max(axis=1)
    passed = (excess + quantile * error + deviation[:, None] < 0).all(axis=1)
    least_p = stats.t.sf(excess / error, count - 1).min(axis=1)  # Holm's first step decides whether any is rejected
    failed = (least_p <= (1 - CONFIDENCE) / 2 / pairs) & (deviation == 0)
    return np.where(passed, PASS, np.where(failed, FAIL, INCONCLUSIVE))


def _error(means: np.ndarray, least_sd: float) -> np.ndarray:
    error: np.ndarray = np.maximum(means.std(axis=-1, ddof=1), least_sd) / math.sqrt(means.shape[-1])
    return error


def page_with_table(text: str) -> str:
    """The page with its table replaced by the simulated one."""
    heads = ["noise of rounds", "wrong"]
    heads += [f"{100 * abs(each):g} % {'faster' if each < 0 else 'slower'}" for each in DIFFERENCES]
    rows = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    for name, model in noise_models().items():
        figures = [_figures(simulate(model, GATES, pairs)) for pairs in (1, 4)]
        rows.append([name, *(f"{one}, {four}" for one, four in zip(*figures, strict=True))])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)


def _figures(gates: SimulatedGates) -> list[str]:
    """How many gates in 100 decide on two equal kernels, and how many have the correct verdict at each difference."""
    wrong = 100 * np.mean(verdicts(gates) != INCONCLUSIVE)
    correct = [
        100 * np.mean(verdicts(gates, difference) == (PASS if difference < 0 else FAIL)) for difference in DIFFERENCES
    ]
    return [f"{wrong:.2f}", *(f"{each:.1f}" for each in correct)]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: gate errors\n")
