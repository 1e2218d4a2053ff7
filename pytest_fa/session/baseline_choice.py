"""Chooses the SDPA backends that a run times: those near the fastest at a shape, by earlier records of this machine.

Only a GPU has such records that count: of the same GPU, driver and torch.  A backend without one is timed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pytest_fa.catalog.plan import Plan
from pytest_fa.options.options import Options
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import LONGEST_LINE_BYTES, read_record_file
from pytest_fa.records.log import saved_name
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Environment, Record
from pytest_fa.regular_file import open_regular

NEAR = 1.10  # a backend that was slower than the fastest by more than this factor is left out
MOST_LOGS = 20  # the newest record files of earlier runs that are read


class LeftOut(msgspec.Struct, frozen=True):
    """A baseline that is not timed at a shape: it took `ratio` times as long as the fastest when it was measured."""

    variant: str
    shape_id: str
    ratio: float
    measured_at: str


def left_out_baselines(options: Options, plan: Plan, environment: Environment) -> tuple[LeftOut, ...]:
    """The baselines that this run does not time.

    None without a GPU, with `--fa-baselines=all`, with `--fa-save`, with a gate, which chooses its own, and with
    `--fa-shard`, since the machines of the other parts may have other records.
    """
    needs_all = options.baselines == "all" or options.save or options.gate is not None or options.shard is not None
    if environment.gpu is None or needs_all:
        return ()
    names = [each.name for each in plan.companions if each.role == "baseline" and plan.is_companion(each)]
    newest: dict[tuple[str, str], Record] = {}
    for record in sorted(_timed(_records(options, names, environment.gpu), environment), key=_measured_at):
        if record.case and record.variant in names:
            newest[(record.case.shape_id, record.variant)] = record
    shapes = itertools.groupby(sorted(newest), key=lambda key: key[0])
    return tuple(each for shape, keys in shapes for each in _slow(shape, [newest[key] for key in keys]))


def left_out_lines(left_out: Iterable[LeftOut], shapes: set[str]) -> list[str]:
    """A line for each shape of a run, with the baselines that were not timed there."""
    lines = []
    for shape, group in itertools.groupby(left_out, key=lambda each: each.shape_id):
        if shape in shapes:
            limit = f"{100 * (NEAR - 1):.0f} %"
            listed = ", ".join(f"{each.variant} ({each.ratio:.2f} x, {each.measured_at[:10]})" for each in group)
            lines.append(
                f"not timed at {shape}: {listed}: more than {limit} slower than the fastest baseline by the "
                "records of this GPU, driver and torch; --fa-baselines=all times them"
            )
    return lines


def _slow(shape: str, records: list[Record]) -> list[LeftOut]:
    times = [(record, record.speed.device.median_us) for record in records if record.speed]
    fastest = min(us for _, us in times)
    return [
        LeftOut(record.variant, shape, us / fastest, record.measured_at) for record, us in times if us > NEAR * fastest
    ]


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
    """The saved records of these variants, and the records of baselines in the newest files of earlier runs."""
    for name in names:
        yield from read_record_file(options.records_folder / gpu_folder(gpu) / saved_name(name)).records
    logs = sorted((options.artifacts / "records").glob("*.jsonl"))  # their names begin with the time
    for path in logs[-MOST_LOGS:]:
        yield from _baselines_of(path)


def _baselines_of(path: Path) -> Iterator[Record]:
    """The records of baselines in one file.  Lines that are no records are named where all lines are read."""
    with contextlib.suppress(OSError), open_regular(path) as stream:
        while line := stream.readline(LONGEST_LINE_BYTES):
            if b'"role":"baseline"' in line:
                with contextlib.suppress(ValueError, RecursionError):
                    yield read_record(line)


def _measured_at(record: Record) -> str:
    return record.measured_at
