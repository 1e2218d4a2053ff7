"""Measure times twice on a GPU, in two ways that should agree, and list those that differ.

python -m tests.honest_times --seconds 240 [--only NAME,...] [--cases CASE,...]

- Data: each candidate at the target shape, if that is among the cases, once with fresh data in every call and once with
  eight sets of inputs that take turns, as older versions had them.  Both are timed several times, in turn, in one
  process.
- Clocks: each candidate and SDPA backend at each case, by the events of its own process and by the judge's clock, which
  gives the slope between runs of two lengths.  Beside them stands the time of calls that each write an output of their
  own.
- Runs: the same for calls that have no slope: those of 1 ms and more, and those that no graph can hold.  The judge's
  clock then shows a whole run, with the message that starts it and the copies that end it.

A line is printed as soon as its two times are measured.  The exit status is 1 if two times differ by more than the
limit, if a variant has no times, or if nothing was measured; it is 2 without a GPU.  A variant for which no time was
left has no times, and is named.  The time includes the builds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import torch

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Device, Variant
from pytest_fa.errors import FaError, UsageProblem, suggestion
from pytest_fa.gpu.device import open_device
from pytest_fa.gpu.inputs import Output, make_inputs
from pytest_fa.host.client import Workers
from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks import fresh_data
from pytest_fa.judge.clocks.device_time import device_time
from pytest_fa.judge.clocks.fresh_data import FreshData
from pytest_fa.judge.clocks.measure import l2_bytes
from pytest_fa.judge.clocks.shifts import RANGE_BYTES
from pytest_fa.options.options import default_cache
from pytest_fa.records.agreement import CLOCK_US, WHOLE_SHARE, slope_limit_us
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.timing import OutsideTime
from pytest_fa.wire.commands import Series
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.honest_cases import KERNELS, WATCHDOG_SECONDS, builds_of

KINDS = """\
data: with fresh data, with sets in turn; clocks: the candidate's, the judge's slope;
runs: the candidate's clock, a whole run by the judge's; outputs: each call has its own"""
HEAD = f"{'kind':6} {'variant':22} {'case':28} {'first us':>9} {'second us':>9} {'differ':>8} {'outputs':>8}"
TARGET = "b1h8s512d64-fp16-seed0"
CLOCK_CASES = (TARGET, "b1h2s64d64-fp16-seed0", "b4h16s2048d64-fp16-seed0")
SETS = 8  # of inputs that take turns
ROUNDS = 3  # of each kind of data
MAX_DATA_SHARE = 0.005
DATA_SHARE_OF_SECONDS = 0.4  # of the time limit


class Pair(NamedTuple):
    """Two times of one variant at one shape that should agree, in microseconds per call."""

    kind: str  # data, clocks or runs
    variant: str
    case: str
    first_us: float  # with fresh data; by the events of the candidate's process
    second_us: float  # with inputs that take turns; by the judge's clock
    longest_us: float  # the limits of the second time
    shortest_us: float
    own_outputs_us: float | None = None

    @property
    def share(self) -> float:
        """How much longer the first is than the second, as a share of the first."""
        return 1 - self.second_us / self.first_us

    @property
    def agrees(self) -> bool:
        """Whether the second time is within its limits."""
        return self.shortest_us <= self.second_us <= self.longest_us


def pair_of_data(variant: str, case: str, fresh_us: float, in_turn_us: float) -> Pair:
    """Two times with different data, which may make a difference of 0.5 %."""
    allowed_us = MAX_DATA_SHARE * fresh_us
    return Pair("data", variant, case, fresh_us, in_turn_us, fresh_us + allowed_us, fresh_us - allowed_us)


def pair_of_clocks(variant: str, case: str, period_us: float, outside: OutsideTime) -> Pair:
    """Two times by different clocks, with the limits of the plugin.

    The message that starts a whole run makes it longer, and never shorter.
    """
    allowed_us = slope_limit_us(period_us)
    longest_us, shortest_us = period_us + allowed_us, period_us - allowed_us
    if outside.proof_us is not None:
        times_us = period_us, outside.median_us
        return Pair("clocks", variant, case, *times_us, longest_us, shortest_us, outside.proof_us)
    longest_us = WHOLE_SHARE * period_us + CLOCK_US + outside.message_us / max(1, outside.calls)
    return Pair("runs", variant, case, period_us, outside.whole_us, longest_us, shortest_us)


class Tally:
    """The pairs so far, and what has none.  `say` gets a line about each pair as soon as it is measured."""

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self._say = say
        self.pairs: list[Pair] = []
        self.failed: list[str] = []
        self.late: list[str] = []

    def add(self, pair: Pair) -> None:
        """Take in a pair."""
        self.pairs.append(pair)
        self._say(row(pair))

    @property
    def agrees(self) -> bool:
        """Whether all variants have times, at least one has, and all of them agree."""
        return bool(self.pairs) and not self.failed and not self.late and all(pair.agrees for pair in self.pairs)


class TakesTurns(FreshData):
    """Data of timed calls as they were before: sets of inputs, each with memory of its own, that take turns."""

    def series(self, count: int, outs: list[Output] | None = None) -> Series:
        """`count` calls, of which call i reads set i modulo `SETS`."""
        fresh = super().series(count, outs)
        q, k, v = (tensor.numel() for tensor in self._like[:3])
        shifts = tuple((place * q, place * k, place * v) for place in (index % SETS for index in range(count)))
        return Series(fresh.first, fresh.outs, shifts, tuple(index % len(fresh.outs) for index in range(count)))


def _buffer_of_sets(tensor: torch.Tensor) -> torch.Tensor:
    """A private buffer for all sets; fresh data use the beginning of it."""
    length = SETS * tensor.numel() + RANGE_BYTES // tensor.element_size()
    return torch.zeros(length, dtype=tensor.dtype, device=tensor.device)


def add_data_pairs(  # what the measurement of one shape needs
    tally: Tally, variants: list[Variant], builds: dict[str, Build], case: Case, device: Device, seconds: float
) -> None:
    """Add the times of each variant with both kinds of data."""
    place, deadline = open_device(device), time.monotonic() + seconds
    for variant in variants:
        if variant.refuses(case):
            continue
        if time.monotonic() > deadline:
            tally.late.append(f"data {variant.name}")
            continue
        try:
            times = _times_of_data(variant, _library(variant, builds), case, place)
        except (FaError, RuntimeError) as problem:
            tally.failed.append(f"data {variant.name}: {problem}")
        else:
            tally.add(pair_of_data(variant.name, case.id, *times))


def _times_of_data(variant: Variant, library: str | None, case: Case, place: torch.device) -> tuple[float, float]:
    """The median times with fresh data and with sets that take turns."""
    candidate = Candidate.in_this_process()
    candidate.open(variant, library, "cuda" if place.type == "cuda" else "cpu", case.computes)
    inputs = make_inputs(case, place)
    fresh: list[float] = []
    in_turn: list[float] = []
    kinds = ((FreshData, fresh), (TakesTurns, in_turn))
    with patch.object(fresh_data, "_slack_buffer", _buffer_of_sets):
        for number in range(ROUNDS):
            for kind, samples in kinds[:: -1 if number % 2 else 1]:
                timing, _, *_ = device_time(kind(candidate, case, inputs, l2_bytes(place)))
                samples.append(timing.median_us)
                candidate.forget_series()
    candidate.end_job()
    return statistics.median(fresh), statistics.median(in_turn)


def add_clock_pairs(
    tally: Tally, variants: list[Variant], builds: dict[str, Build], cases: list[Case], seconds: float
) -> None:
    """Add the times of each variant at each shape by both clocks; judge and candidate have a process each."""
    deadline = time.monotonic() + seconds
    with Workers() as workers:
        workers.start()
        for case, variant in itertools.product(cases, variants):
            if variant.refuses(case):
                continue
            if time.monotonic() > deadline:
                tally.late.append(f"clocks {variant.name} at {case.id}")
                continue
            add_clock_pair(tally, variant, case, workers.run(_timed_job(variant, builds, case)))


def add_clock_pair(tally: Tally, variant: Variant, case: Case, result: CaseResult) -> None:
    """Add the times of one result by both clocks, or why it has none."""
    if result.speed and (outside := result.speed.outside):
        tally.add(pair_of_clocks(variant.name, case.id, result.speed.device.median_us, outside))
    elif result.outcome != "unsupported":  # a baseline may refuse a shape
        tally.failed.append(f"clocks {variant.name} at {case.id}: {result.outcome}: {result.message}")


def _timed_job(variant: Variant, builds: dict[str, Build], case: Case) -> CaseJob:
    return CaseJob(
        variant=variant,
        case=case,
        library=_library(variant, builds),
        device="cuda",
        policy=variant.tolerance,
        checks_output=variant.is_judged,
        time=True,
        repeats=0,
        watchdog_seconds=WATCHDOG_SECONDS,
        file_hashes=builds[variant.name].files if variant.name in builds else {},
        shares_gpu=True,  # clocks that contradict each other are a pair that differs, and no tampering
    )


def _library(variant: Variant, builds: dict[str, Build]) -> str | None:
    return str(default_cache() / builds[variant.name].library) if variant.name in builds else None


def row(pair: Pair) -> str:
    """The line of a pair: its two times, how much they differ, and what outputs of their own cost."""
    return (
        f"{pair.kind:6} {pair.variant:22} {pair.case:28} {pair.first_us:9.2f} {pair.second_us:9.2f} "
        f"{100 * pair.share:+6.2f} % {_own_outputs(pair):>8}{'' if pair.agrees else '  DIFFERS'}"
    )


def ends(tally: Tally) -> list[str]:
    """How many pairs of each kind agree, and what has no times."""
    lines = []
    if not (tally.pairs or tally.failed or tally.late):
        lines.append("nothing was measured: no chosen variant takes the cases")
    for kind in dict.fromkeys(pair.kind for pair in tally.pairs):
        of_kind = [pair for pair in tally.pairs if pair.kind == kind]
        lines.append(f"{kind}: {sum(pair.agrees for pair in of_kind)} of {len(of_kind)} agree")
    lines += [f"NO TIMES: {text}" for text in tally.failed]
    return lines + [f"no time left for: {text}" for text in tally.late]


def _own_outputs(pair: Pair) -> str:
    """How much longer calls take that write an output of their own."""
    if not pair.own_outputs_us or pair.second_us <= 0:
        return "-"
    return f"{100 * (pair.own_outputs_us / pair.second_us - 1):+.1f} %"


def main() -> int:
    """Measure, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--cases", default=",".join(CLOCK_CASES))
    arguments = parser.parse_args()
    only = tuple(filter(None, arguments.only.split(",")))
    known = discover((KERNELS,)).variants
    if unknown := [name for name in only if name not in known]:
        parser.error(f"--only: no variant {unknown[0]!r}{suggestion(unknown[0], known)} (see pytest --fa-list)")
    try:
        cases = [parse_case(each) for each in arguments.cases.split(",")]
    except UsageProblem as problem:
        parser.error(f"--cases: {problem}")
    gpu = find_gpu()
    if gpu is None:
        sys.stderr.write("these times are measured on a GPU, and this machine has none\n")
        return 2
    variants = [each for each in known.values() if each.computes == "attention" and (not only or each.name in only)]
    candidates = [each for each in variants if each.role == "candidate" and "cuda" in each.supports.device]
    baselines = [each for each in variants if each.role == "baseline" and each.name.startswith("sdpa_")]
    deadline = time.monotonic() + arguments.seconds
    builds, tally = builds_of(candidates, default_cache()), Tally(_say)
    tally.failed += [f"{each.name} is not built" for each in candidates if each.is_built and each.name not in builds]
    candidates = [each for each in candidates if not each.is_built or each.name in builds]
    for line in (gpu.name, KINDS, HEAD):
        _say(line)
    try:
        with timing_lock():
            if (target := parse_case(TARGET)) in cases:
                data_seconds = DATA_SHARE_OF_SECONDS * (deadline - time.monotonic())
                add_data_pairs(tally, candidates, builds, target, "cuda", data_seconds)
            left_seconds = deadline - time.monotonic()
            add_clock_pairs(tally, [*baselines, *candidates], builds, cases, left_seconds)
    finally:
        for line in ends(tally):
            _say(line)
    return 0 if tally.agrees else 1


def _say(line: str) -> None:
    """Print a line at once, so that a run that is interrupted has said what it measured."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
