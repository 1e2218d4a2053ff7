"""Chooses what a run times beside the selected variants, by earlier records of this machine.

These are the SDPA backends near the fastest at a shape, and an empty kernel if there is no time of it.  Only a GPU has
records that count: of the same GPU, driver and torch.  A backend or an empty kernel without one is timed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.options.options import Options
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import LONGEST_LINE_BYTES, read_record_file
from pytest_fa.records.log import saved_name
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Environment, Record
from pytest_fa.regular_file import open_regular

NEAR = 1.10  # a backend that was slower than the fastest by more than this factor is left out
_ROLES = tuple(f'"role":"{role}"'.encode() for role in COMPANION_ROLES)
MOST_LOGS = 20  # the newest record files of earlier runs that are read


class LeftOut(msgspec.Struct, frozen=True):
    """A variant that is not timed at a shape, with its time when it was measured.

    A baseline took `ratio` times as long as the fastest.  An empty kernel has no ratio.
    """

    variant: str
    shape_id: str
    device_us: float
    measured_at: str
    ratio: float | None


def left_out_baselines(options: Options, plan: Plan, environment: Environment) -> tuple[LeftOut, ...]:
    """The baselines and empty kernels that this run does not time.

    None without a GPU, with `--fa-baselines=all`, with `--fa-save`, with a gate, which chooses its own, and with
    `--fa-shard`, since the machines of the other parts may have other records.
    """
    needs_all = options.baselines == "all" or options.save or options.gate is not None or options.shard is not None
    if environment.gpu is None or needs_all:
        return ()
    names = [each.name for each in plan.companions if plan.is_companion(each)]
    newest: dict[tuple[str, str], Record] = {}
    for record in sorted(_timed(_records(options, names, environment.gpu), environment), key=_measured_at):
        if record.case and record.variant in names:
            newest[(record.case.shape_id, record.variant)] = record
    shapes = itertools.groupby(sorted(newest), key=lambda key: key[0])
    return tuple(each for shape, keys in shapes for each in _unneeded(shape, [newest[key] for key in keys]))


def left_out_lines(left_out: Iterable[LeftOut], shapes: set[str]) -> list[str]:
    """A line for each shape of a run with the baselines that were not timed there, and one for the empty kernels."""
    listed = [each for each in left_out if each.shape_id in shapes]
    lines = []
    for shape, group in itertools.groupby((each for each in listed if each.ratio), key=lambda each: each.shape_id):
        slow = ", ".join(f"{each.variant} ({each.ratio:.2f} x, {each.measured_at[:10]})" for each in group)
        lines.append(
            f"not timed at {shape}: {slow}: more than {100 * (NEAR - 1):.0f} % slower than the fastest baseline by the "
            "records of this GPU, driver and torch; --fa-baselines=all times them"
        )
    if empty := [each for each in listed if each.ratio is None]:
        known = ", ".join(f"{each.device_us:.2f} us at {each.shape_id} on {each.measured_at[:10]}" for each in empty)
        names = ", ".join(sorted({each.variant for each in empty}))
        lines.append(f"not timed again: {names}, an empty kernel: {known}; --fa-baselines=all times it")
    return lines


def _unneeded(shape: str, records: list[Record]) -> list[LeftOut]:
    """The baselines far from the fastest, and the empty kernels."""
    times = [(record, record.speed.device.median_us) for record in records if record.speed]
    fastest = min((us for record, us in times if record.role == "baseline"), default=0.0)
    left_out = []
    for record, us in times:
        is_baseline = record.role == "baseline"
        if not is_baseline or us > NEAR * fastest:
            ratio = us / fastest if is_baseline else None
            left_out.append(LeftOut(record.variant, shape, us, record.measured_at, ratio))
    return left_out


def _timed(records: Iterable[Record], environment: Environment) -> list[Record]:
    """The records with a time, made with this GPU, driver and torch."""
    machine = (environment.gpu, environment.driver, environment.torch)
    return [
        record
        for record in records
        if record.speed
        and record.outcome == "ok"
        and machine == (record.environment.gpu, record.environment.driver, record.environment.torch)
    ]


def _records(options: Options, names: list[str], gpu: str) -> Iterator[Record]:
    """The saved records of these variants, and those of companions in the newest files of earlier runs."""
    for name in names:
        yield from read_record_file(options.records_folder / gpu_folder(gpu) / saved_name(name)).records
    logs = sorted((options.artifacts / "records").glob("*.jsonl"))  # their names begin with the time
    for path in logs[-MOST_LOGS:]:
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
