"""`fa-accuracy`: how often gates on equal kernels are wrong, and how noisy each card was, by what was recorded."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from pytest_fa.features.gate.decision import ANALYSES
from pytest_fa.features.gate.gated import Gate, GateVerdict
from pytest_fa.features.gate.noise import NAME as NOISE
from pytest_fa.features.gate.noise import Noise, read_noise
from pytest_fa.features.gate.noise_table import verdict_at_one
from pytest_fa.records.agreement import LONG_NODE_US, is_unconfirmed
from pytest_fa.records.origin import origin_of_file
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ProfilerTime, Speed
from tools.docs.block import (
    NOTHING,
    Shown,
    TableProblem,
    one_of,
    read_words,
    standing_of,
    table,
    with_line,
    with_origin,
)

GATES = 200
SEED = 20
CONFIDENCE = 0.95  # of the upper limit of the rate of false verdicts
UNKNOWN = "unknown"  # the card of older records


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of the comment: `of` is `gates` or `cards`."""

    of: str
    profiles: str


def block(words: str, root: Path) -> str:
    """The table that the words of a comment describe.  Raises `TableProblem` for words or files that do not exist."""
    spec = read_words(words, Spec)
    return one_of(spec.of, {"gates": _gates, "cards": _cards}, "of")(root / spec.profiles)


def contents(words: str, _root: Path) -> Shown:
    """The noise that the gates are drawn from; the cards are those of whatever is saved."""
    spec = read_words(words, Spec)
    return Shown(spec.profiles, files=(NOISE,)) if spec.of == "gates" else Shown()


# -- gates on equal kernels -------------------------------------------------------------------------------------------


class EqualKernels(NamedTuple):
    """The rounds of a kernel against itself, and the verdicts of gates that were drawn from them."""

    pair: PairSamples
    verdicts: Counter[GateVerdict]


def gates_on_equal_kernels(noise: Noise, gates: int = GATES, seed: int = SEED) -> list[EqualKernels]:
    """Draw `gates` gates from the recorded rounds of kernels against themselves, equally many for each kernel.

    A gate is 12 rounds, drawn with replacement, with the A/A control of the same rounds.  In every second gate of a
    kernel, the pair and its control change places: both are a kernel against itself.
    """
    draw = random.Random(seed)  # noqa: S311  # a sample, not a secret
    pairs = [pair for pair, name in zip(noise.pairs, noise.candidates, strict=True) if name == pair.baseline]
    drawn = [EqualKernels(pair, Counter()) for pair in pairs]
    for number in range(gates if pairs else 0):
        pair, verdicts = drawn[number % len(pairs)]
        sides = (pair.blocks, pair.control) if number // len(pairs) % 2 else (pair.control, pair.blocks)
        rounds = draw.choices(range(noise.processes), k=ANALYSES[-1])
        blocks, control = (tuple(side[each] for each in rounds) for side in sides)
        gate = PairSamples(pair.shape_id, pair.baseline, blocks, control)
        verdicts[verdict_at_one(gate, noise.process_sd)] += 1
    return drawn


def highest_rate(wrong: int, gates: int) -> float:
    """The upper limit of the rate of an event that was seen `wrong` times in `gates`, after Clopper and Pearson."""
    from scipy import stats  # noqa: PLC0415  # the import takes half a second

    return float(stats.beta.ppf(CONFIDENCE, wrong + 1, gates - wrong)) if wrong < gates else 1.0


def _gates(folder: Path) -> str:
    noise = read_noise(folder.parent, folder.name)
    if noise is None:
        raise TableProblem(f"there is no {NOISE} in {folder}; `python -m pytest_fa noise` makes one")
    drawn = gates_on_equal_kernels(noise)
    names: tuple[GateVerdict, ...] = get_args(GateVerdict)
    rows = [["kernel against itself", "shape", "gates", *names]]
    for each in drawn:
        counts = [each.verdicts.total(), *(each.verdicts[name] for name in names)]
        rows.append([each.pair.baseline, f"`{each.pair.shape_id}`", *map(str, counts)])
    total = sum((each.verdicts for each in drawn), Counter[GateVerdict]())
    wrong, gates = total["PASS"] + total["FAIL"], total.total()
    limit = f"the rate is below {100 * highest_rate(wrong, gates):.1f} % with {100 * CONFIDENCE:.0f} % confidence"
    said = f"{wrong} of {gates} gates have a false verdict: for these rounds, {limit}."
    return f"{said}\n\n{with_line(table(rows), origin_of_file(noise.environment, noise.source, noise.measured_at))}"


# -- cards ------------------------------------------------------------------------------------------------------------

HEADS = ["card", "times", "judge's clock, %", "profiler, %", "not confirmed"]
HEADS += ["rounds of gates", "spread, %", "spread of the A/A control, %"]


def _cards(folder: Path) -> str:
    """A row for each card, those with most times first, and one for all."""
    saved = [record for path in sorted(folder.glob("*.jsonl")) for record in standing_of(folder, path.stem)]
    shown = [each for each in saved if (each.speed and not each.speed.is_on_cpu) or Gate.of(each)]
    if not shown:
        raise TableProblem(f"no time and no gate in {folder}; `pytest --fa-save` saves them")
    by_card: dict[str, list[Record]] = {}
    for record in shown:
        by_card.setdefault((record.machine and record.machine.gpu_hash) or UNKNOWN, []).append(record)
    rows = sorted(by_card.items(), key=lambda item: (item[0] == UNKNOWN, -len(item[1]), item[0]))
    return with_origin(table([HEADS, *(_card(name, records) for name, records in (*rows, ("all", shown)))]), shown)


def _card(name: str, records: Sequence[Record]) -> list[str]:
    speeds = [each.speed for each in records if each.speed]
    samples = [pair.samples for gate in Gate.all_of(records) for pair in gate.pairs]
    return [
        name,
        str(len(speeds)),
        _median_and_largest([share for each in speeds for share in judge_difference(each)]),
        _median_and_largest([share for each in speeds for share in profiler_difference(each)]),
        str(sum(map(is_unconfirmed, speeds))),
        str(sum(len(each.blocks) for each in samples)),
        _pooled([each.means for each in samples]),
        _pooled([each.control_means for each in samples]),
    ]


def judge_difference(speed: Speed) -> Iterator[float]:
    """By what share of `device_us` the judge's slope differs from it; nothing without a slope."""
    if speed.outside and speed.outside.proof_us is not None:
        yield abs(speed.outside.median_us / speed.device.median_us - 1)


def profiler_difference(speed: Speed) -> Iterator[float]:
    """By what share of `device_us` the profiler's time differs, after the correction for short kernels."""
    if speed.profiler and (count := sum(node.count for node in speed.profiler.nodes)):
        yield abs(_profiled_us(speed.profiler, count) / speed.device.median_us - 1)


def _profiled_us(profiler: ProfilerTime, count: int) -> float:
    is_long = profiler.profiler_us / count >= LONG_NODE_US
    return profiler.profiler_us + (0.0 if is_long else profiler.clock_offset_us)


def _median_and_largest(shares: list[float]) -> str:
    return f"{100 * statistics.median(shares):.2f}, {100 * max(shares):.2f}" if shares else NOTHING


def _pooled(samples: list[list[float]]) -> str:
    """The standard deviation of rounds around the mean of their own gate and shape, in percent."""
    squares = [(each - statistics.fmean(means)) ** 2 for means in samples for each in means]
    free = len(squares) - len(samples)
    return f"{100 * math.sqrt(sum(squares) / free):.2f}" if free > 0 else NOTHING
