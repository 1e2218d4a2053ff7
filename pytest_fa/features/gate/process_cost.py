"""How long one process of a gate takes: measured in this run, else by records of this machine, else a usual time."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_fa.features.gate.decision import ANALYSES
from pytest_fa.features.gate.gated import Gate
from pytest_fa.options.options import Options
from pytest_fa.records.files import LONGEST_LINE_BYTES
from pytest_fa.records.paired import PARTS
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Environment
from pytest_fa.regular_file import open_regular
from pytest_fa.wire.jobs import PairedResult

ONCE = ("processes", "files")  # the parts that a process has once, however many pairs it measures
MAX_LOGS = 20  # the newest record files of earlier runs that are read
UNEXPECTED = 0.25  # a process that took longer or shorter than announced by more than this share is said
_HAS_PARTS = b'"part_seconds":{"'


class ProcessCost(NamedTuple):
    """The seconds of a process without its pairs, and of each pair."""

    once: float
    per_pair: float

    def seconds(self, pairs: int, processes: int = 1) -> float:
        """The seconds of processes that measure this many pairs."""
        return processes * (self.once + self.per_pair * pairs)


USUAL = ProcessCost(1.0, 2.0)  # where no gate was measured


def part_seconds(results: Sequence[PairedResult]) -> dict[str, float]:
    """The mean seconds of each part of a process."""
    known = [result.seconds for result in results if result.seconds]
    return {
        part: statistics.fmean(seconds.get(part, 0.0) for seconds in known)
        for part in PARTS
        if any(part in seconds for seconds in known)
    }


def cost_of(gate: Gate) -> ProcessCost | None:
    """What a process of a gate took; None for a record without its parts, or in which they took no time."""
    seconds = sum(gate.part_seconds.values())
    if seconds <= 0 or not gate.pairs:
        return None
    once = sum(gate.part_seconds.get(part, 0.0) for part in ONCE)
    return ProcessCost(once, (seconds - once) / len(gate.pairs))


def expected_cost(earlier: Sequence[Gate], options: Options, environment: Environment) -> ProcessCost:
    """What a process of the next gate takes: as in the last gate of this run, else as in the last recorded one."""
    for gate in (*reversed(earlier), *_recorded(options, environment)):
        if cost := cost_of(gate):
            return cost
    return USUAL


def correction(name: str, expected: ProcessCost, results: Sequence[PairedResult], pairs: int, per_round: int) -> str:
    """After the second process, what the gate takes if that was not expected; else an empty text.

    The first process is not like the others: it plans the samples, proves all arms, and may wait for the server.
    `per_round` processes run side by side, one on each GPU.
    """
    if len(results) != 2 * per_round or not (seconds := sum(part_seconds(results[per_round:]).values())):
        return ""
    if abs(seconds / expected.seconds(pairs) - 1) <= UNEXPECTED:
        return ""
    few, many = ANALYSES
    totals = f"{few} take about {few * seconds:.0f} s, {many} about {many * seconds:.0f} s"
    return f"gate {name}: each process takes about {seconds:.1f} s: {totals}"


def _recorded(options: Options, environment: Environment) -> Iterator[Gate]:
    """The gates of the newest record files of earlier runs on this kind of machine, the newest first."""
    for path in sorted((options.artifacts / "records").glob("*.jsonl"), reverse=True)[:MAX_LOGS]:
        yield from reversed(_gates_of(path, environment))


def _gates_of(path: Path, environment: Environment) -> list[Gate]:
    """The gates of one record file.  Lines that are no records are named where all lines are read."""
    gates: list[Gate] = []
    with contextlib.suppress(OSError), open_regular(path) as stream:
        while line := stream.readline(LONGEST_LINE_BYTES):
            if _HAS_PARTS in line:
                with contextlib.suppress(ValueError, RecursionError):
                    record = read_record(line)
                    gate = Gate.of(record)
                    if gate and (record.environment.gpu, record.environment.cpu) == _machine(environment):
                        gates.append(gate)
    return gates


def _machine(environment: Environment) -> tuple[str | None, str | None]:
    return environment.gpu, environment.cpu
