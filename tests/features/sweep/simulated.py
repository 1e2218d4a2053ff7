"""A bench without kernels: each process of a configuration is a recorded process of an H200, moved by a true ratio.

As a program, it runs trials of a journal in a process of its own:

    python -m tests.features.sweep.simulated JOURNAL LOG
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from pytest_fa.features.gate.decision import ANALYSES, analyse
from pytest_fa.features.gate.noise import Noise, decode_noise
from pytest_fa.features.sweep.owners import _started, this_process
from pytest_fa.features.sweep.search import BuiltPoint, GateAnswer, run_trial
from pytest_fa.features.sweep.shared_study import SharedStudy
from pytest_fa.features.sweep.storage import open_storage
from pytest_fa.features.sweep.suggest import Space, Suggester
from pytest_fa.features.sweep.sweep_space import Point, Sweep, point_text
from pytest_fa.features.sweep.trial_result import ConfirmedRatio, TrialOutcome, TrialResult
from pytest_fa.records.paired import PairSamples

NOISE = Path(__file__).parents[2] / "recorded" / "profiles" / "nvidia-h200" / "noise.json"
SHAPE = "b1h8s512d64-fp16"
SIXTY = Sweep({"M": (16, 32, 48, 64, 80), "N": (1, 2, 3, 4), "MODE": ("A", "B", "C")})
DEFINES: dict[str, int | str] = {"M": 1000, "N": 1000, "MODE": "PARENT"}

Effect = Callable[[Point], float]  # the true log-ratio of a configuration


@cache
def recorded_noise() -> Noise:
    """The recorded processes of this project's H200."""
    return decode_noise(NOISE.read_bytes())


@cache
def recorded_processes() -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
    """The blocks and the control of every recorded process of two different kernels, with mean 0 over processes."""
    processes = []
    noise = recorded_noise()
    for pair, name in zip(noise.pairs, noise.candidates, strict=True):
        if name != pair.baseline:
            mean = statistics.fmean(pair.means)
            blocks = [tuple(value - mean for value in row) for row in pair.blocks]
            processes += list(zip(blocks, pair.control, strict=True))
    return tuple(processes)


class RecordedBench:
    """Configurations with a true ratio each.  `wrong` are found to be wrong when they are judged; `log` has all calls.

    `code_of` gives the machine code of a configuration; without it, all differ.
    """

    parent_code = "the parent's"

    def __init__(
        self,
        effect: Effect,
        seed: int,
        wrong: Callable[[Point], bool] | None = None,
        code_of: Callable[[Point], str] = point_text,
    ) -> None:
        self._effect, self._code_of = effect, code_of
        self._wrong = wrong or (lambda _: False)
        self._random = random.Random(seed)  # noqa: S311  # no secret
        self.log: list[tuple[str, str]] = []

    def build(self, point: Point) -> BuiltPoint | TrialResult:
        """Every configuration compiles."""
        return BuiltPoint(self._code_of(point), {"registers_per_thread": 64 + len(point_text(point))}, 0.0)

    def check_searched(self, point: Point) -> TrialResult | None:
        """A wrong configuration is found."""
        self.log.append(("check", point_text(point)))
        return TrialResult(TrialOutcome.WRONG, "max error") if self._wrong(point) else None

    def measure(self, point: Point) -> TrialResult:
        """The mean of one recorded process."""
        self.log.append(("measure", point_text(point)))
        blocks, _ = self._process()
        return TrialResult(TrialOutcome.RIGHT, log_ratio=self._effect(point) + statistics.fmean(blocks))

    def check_unsearched(self, point: Point) -> tuple[int, TrialResult | None]:
        """Nothing else is wrong."""
        self.log.append(("check", point_text(point)))
        return 1, None

    def measure_unsearched(self, point: Point) -> dict[str, float] | TrialResult:
        """One other shape."""
        return {"b1h2s64d64-fp16": self._effect(point)}

    def gate(self, point: Point) -> GateAnswer:
        """The gate's own analysis of recorded processes."""
        self.log.append(("gate", point_text(point)))
        effect = self._effect(point)
        rows: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
        for count in ANALYSES:
            while len(rows) < count:
                blocks, control = self._process()
                rows.append((tuple(value + effect for value in blocks), control))
            samples = PairSamples(SHAPE, "parent", tuple(row for row, _ in rows), tuple(row for _, row in rows))
            is_last, known_sd = count == ANALYSES[-1], recorded_noise().process_sd
            analysis = analyse([samples], 1.0, is_last=is_last, process_sd=known_sd)
            if analysis.verdict:
                break
        (interval,) = analysis.intervals
        ratio = ConfirmedRatio(SHAPE, *(math.exp(each) for each in (interval.mean, interval.low, interval.high)))
        return GateAnswer(analysis.verdict or "INCONCLUSIVE", analysis.reason, (ratio,))

    def _process(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self._random.choice(recorded_processes())


def facts_of(sweep: Sweep) -> dict[str, object]:
    """What a study of this sweep stores."""
    return {"variant": "tuned", "values": {name: list(values) for name, values in sweep.values.items()}, "cases": []}


def in_memory(sweep: Sweep) -> SharedStudy:
    """A new study that only this process has."""
    import optuna

    return SharedStudy(optuna.storages.InMemoryStorage(), "tuned", facts_of(sweep))


def ending_of(pid: int) -> dict[str, Any]:
    """What a living process stores when it is elected to end a sweep."""
    owner = msgspec.structs.replace(this_process(), pid=pid, started=_started(pid))
    return {"owner": msgspec.to_builtins(owner), "begun": time.time()}


class _LoggingBench(RecordedBench):
    """Writes each configuration that it times to a file.  The one after `hang_after` is never finished."""

    def __init__(self, log: Path, hang_after: int) -> None:
        super().__init__(lambda _: 0.0, 0)
        self._file, self._left = log, hang_after

    def measure(self, point: Point) -> TrialResult:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(f"{point_text(point)}\n")
        while self._left == 0:
            time.sleep(60)
        self._left -= 1
        return super().measure(point)


def main(journal: str, log: str, hang_after: str) -> None:
    """Run trials until none is left, or until the bench hangs."""
    study = SharedStudy(open_storage(journal), "tuned", facts_of(SIXTY))
    suggester = Suggester(Space(SIXTY, DEFINES), 100, "tpe", random.SystemRandom().randrange(2**31))
    bench = _LoggingBench(Path(log), int(hang_after))
    while run_trial(study, suggester, bench, 100):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
