"""Chooses what a run times beside the selected variants, by earlier records of this machine.

These are the SDPA backends near the fastest at a shape, and an empty kernel if there is no time of it.  Only a GPU has
records that count: of the same GPU, driver and torch.  A backend or an empty kernel without one is timed,
and so is one whose newest result at a shape is a failure.

An SDPA backend near the fastest that an earlier run timed a few minutes ago on this very GPU is not timed again: its
record stands for a new one, for as long as somebody edits a kernel and runs it again and again.  That of a baseline of
the user's does not: its code may have changed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.options.options import Options
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import LONGEST_LINE_BYTES, read_record_file
from pytest_fa.records.log import saved_name
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Environment, MachineIdentity, Record
from pytest_fa.records.standing import standing_results
from pytest_fa.records.timing import Speed
from pytest_fa.regular_file import open_regular
from pytest_fa.wire.jobs import is_built_in

NEAR = 1.10  # a backend that was slower than the fastest by more than this factor is left out
_ROLES = tuple(f'"role":"{role}"'.encode() for role in COMPANION_ROLES)
MAX_LOGS = 20  # the newest record files of earlier runs that are read
RECENT_SECONDS = 600.0  # how old a time may be that stands for a new one


class LeftOut(msgspec.Struct, frozen=True):
    """A variant that is not timed at a shape, with its times when it was measured.

    A baseline took `ratio` times as long as the fastest.  An empty kernel has no ratio.  `recent` is the record that
    stands for a new one, if there is one, and `age_seconds` says how old it was when the run began.
    """

    variant: str
    shape_id: str
    speed: Speed
    measured_at: str
    ratio: float | None
    recent: Record | None = None
    age_seconds: float = 0.0


def left_out_baselines(
    options: Options,
    plan: Plan,
    environment: Environment,
    machine: MachineIdentity | None = None,
    now: datetime | None = None,
) -> tuple[LeftOut, ...]:
    """The baselines and empty kernels that this run does not time.

    None without a GPU, with `--fa-baselines=all`, with `--fa-save`, and with a feature that needs all times.  Recent
    times of `machine` stand for new ones only with `--fa-baselines=needed`, and if `Options.reuses_times`.
    """
    needs_all = options.baselines == "all" or options.save or any(part.needs_all_times for part in options.parts)
    if environment.gpu is None or needs_all:
        return ()
    companions = {each.name: each for each in plan.companions if plan.is_companion(each)}
    records = sorted(_records(options, list(companions), environment.gpu), key=_measured_at)
    newest = _by_shape(_timed(standing_results(records).records, environment), companions)
    last = {key: record.measured_at for key, record in _by_shape(records, companions).items()}  # whatever came of it
    shapes = itertools.groupby(sorted(newest), key=lambda key: key[0])
    may_reuse = options.baselines == "needed" and options.reuses_times
    built_in = frozenset(name for name, each in companions.items() if is_built_in(each))
    recent = Recent(machine if may_reuse else None, environment, now or datetime.now(UTC), built_in, last)
    return tuple(each for shape, keys in shapes for each in _unneeded(shape, [newest[key] for key in keys], recent))


class Recent(NamedTuple):
    """What a recent time was measured on and with, and the time at which the run begins.

    `variants` are those whose code has not changed, and `last` is when each was measured last, by shape and variant.
    """

    machine: MachineIdentity | None
    environment: Environment
    now: datetime
    variants: frozenset[str]
    last: Mapping[tuple[str, str], str]

    def age_seconds(self, record: Record) -> float | None:
        """The age of a record that may stand for a new one; None if it may not."""
        if self.machine is None or self.machine.gpu_hash is None or record.variant not in self.variants:
            return None
        if (record.machine, record.environment) != (self.machine, self.environment) or not self._is_clean(record):
            return None
        try:
            age_seconds = (self.now - datetime.fromisoformat(record.measured_at)).total_seconds()
        except (ValueError, TypeError):  # no time, or one without a zone
            return None
        return age_seconds if 0 <= age_seconds <= RECENT_SECONDS else None

    def _is_clean(self, record: Record) -> bool:
        """Whether the variant was last measured then, on a GPU that nothing else used."""
        is_last = record.case and record.measured_at == self.last[record.case.shape_id, record.variant]
        return bool(is_last and record.speed and not record.speed.other_gpu_processes and not record.unprotected)


def left_out_lines(left_out: Iterable[LeftOut], shapes: set[str]) -> list[str]:
    """A line for each shape of a run with the baselines that were not timed there, and one for the empty kernels."""
    listed = [each for each in left_out if each.shape_id in shapes]
    lines = []
    if any(each.recent for each in listed):
        lines.append(
            f"times of baselines from the last {RECENT_SECONDS / 60:.0f} minutes were not measured again; "
            "--fa-baselines=near measures them"
        )
    slow_ones = (each for each in listed if each.ratio and not each.recent)
    for shape, group in itertools.groupby(slow_ones, key=lambda each: each.shape_id):
        slow = ", ".join(f"{each.variant} ({each.ratio:.2f} x, {each.measured_at[:10]})" for each in group)
        lines.append(
            f"not timed at {shape}: {slow}: more than {100 * (NEAR - 1):.0f} % slower than the fastest baseline by the "
            "records of this GPU, driver and torch; --fa-baselines=all times them"
        )
    empty = [each for each in listed if each.ratio is None]
    for name, group in itertools.groupby(sorted(empty, key=lambda each: each.variant), key=lambda each: each.variant):
        known = "; ".join(f"{_times_text(each.speed)} at {each.shape_id} ({each.measured_at[:10]})" for each in group)
        lines.append(f"not timed again: {name}, an empty kernel: {known}; --fa-baselines=all times it")
    return lines


def _times_text(speed: Speed) -> str:
    """The times of the table's columns, such as `device_us 0.50, cold_us 2.91, call_us 6.81`."""
    times = {"device_us": speed.device, "cold_us": speed.cold, "call_us": speed.call}
    return ", ".join(f"{name} {timing.median_us:.2f}" for name, timing in times.items() if timing)


def _unneeded(shape: str, records: list[Record], recent: Recent) -> list[LeftOut]:
    """The baselines far from the fastest, those with a recent time, and the empty kernels."""
    times = [(record, record.speed) for record in records if record.speed]
    fastest = min((speed.device.median_us for record, speed in times if record.role == "baseline"), default=0.0)
    left_out = []
    for record, speed in times:
        is_baseline, us = record.role == "baseline", speed.device.median_us
        is_near = is_baseline and us <= NEAR * fastest
        ratio, age_seconds = us / fastest if is_baseline else None, recent.age_seconds(record) if is_near else None
        entry = LeftOut(record.variant, shape, speed, record.measured_at, ratio)
        if age_seconds is not None:
            left_out.append(msgspec.structs.replace(entry, recent=record, age_seconds=age_seconds))
        elif not is_near:
            left_out.append(entry)
    return left_out


def _timed(records: Iterable[Record], environment: Environment) -> list[Record]:
    """The records with a time, made with this GPU, driver and torch."""
    machine = (environment.gpu, environment.driver, environment.torch)
    return [
        record
        for record in records
        if record.speed
        and not is_unconfirmed(record.speed)
        and record.outcome == Outcome.OK
        and machine == (record.environment.gpu, record.environment.driver, record.environment.torch)
    ]


def _by_shape(records: Iterable[Record], variants: Collection[str]) -> dict[tuple[str, str], Record]:
    """The last of these records for each shape and variant."""
    return {(each.case.shape_id, each.variant): each for each in records if each.case and each.variant in variants}


def _records(options: Options, names: list[str], gpu: str) -> Iterator[Record]:
    """The saved records of these variants, and those of companions in the newest files of earlier runs."""
    for name in names:
        yield from read_record_file(options.records_folder / gpu_folder(gpu) / saved_name(name)).records
    logs = sorted((options.artifacts / "records").glob("*.jsonl"))  # their names begin with the time
    for path in logs[-MAX_LOGS:]:
        yield from _companions_of(path)


def _companions_of(path: Path) -> Iterator[Record]:
    """The records of companions in one file.  Lines that are no records are named where all lines are read."""
    with contextlib.suppress(OSError), open_regular(path) as stream:
        while line := stream.readline(LONGEST_LINE_BYTES):
            if any(role in line for role in _ROLES):
                with contextlib.suppress(ValueError, RecursionError):
                    yield read_record(line)


def _measured_at(record: Record) -> str:
    return record.measured_at
