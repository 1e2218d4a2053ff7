"""The environment of the records, and the commands that repeat them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pytest_fa.records.record import Environment, Record
from pytest_fa.table.rows import NOTHING

LABELS = {"gpu": "GPU", "cpu": "CPU", "cuda": "CUDA", "pytest_fa": "pytest-fa"}
MACHINE_LABELS = {
    "host_hash": "machine (hash)",
    "gpu_hash": "GPU (hash)",
    "mig": "MIG",
    "ecc": "ECC",
    "power_limit_watts": "power limit (W)",
}
MAX_VALUES = 6  # of one property
MAX_COMMANDS = 40


class PropertyRow(NamedTuple):
    """One property of the environment and its values, the most frequent first."""

    name: str
    values: str


def environment_rows(records: list[Record]) -> tuple[PropertyRow, ...]:
    """The properties of the environments, the commits, the compilers, and when the records were measured."""
    values: dict[str, Counter[str]] = {}
    for record in records:
        for name, value in _properties(record):
            values.setdefault(name, Counter())[value] += 1
    times = sorted(record.measured_at for record in records)
    measured = PropertyRow("measured", times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}")
    return (*(PropertyRow(name, _listed(counts)) for name, counts in values.items()), measured)


def commands_of(records: list[Record], main_shape: str | None) -> tuple[str, ...]:
    """The commands that repeat failures, gates and profiles, and for each variant its time at the main shape."""
    first = [record for record in records if record.outcome.is_failure or record.kind in ("gate", "profile")]
    first.sort(key=lambda record: not record.outcome.is_failure)
    timed = [record for record in records if record.speed and record.case and record.case.shape_id == main_shape]
    commands = dict.fromkeys(record.rerun_command for record in (*first, *timed))
    hidden = [f"# and {len(commands) - MAX_COMMANDS} more, in the records"] if len(commands) > MAX_COMMANDS else []
    return (*list(commands)[:MAX_COMMANDS], *hidden)


def _properties(record: Record) -> Iterable[tuple[str, str]]:
    for name in Environment.__struct_fields__:
        yield LABELS.get(name, name.replace("_", " ")), str(getattr(record.environment, name) or NOTHING)
    for name, text in MACHINE_LABELS.items():
        if (value := getattr(record.machine, name, None)) is not None:
            yield text, str(value)
    commit = record.source.commit[:12] if record.source.commit else NOTHING
    yield "commit", f"{commit} with changes" if record.source.dirty else commit
    for build in record.builds:
        yield "compiler", build.compiler
        for name, value in build.environment.items():
            yield name, value


def _listed(counts: Counter[str]) -> str:
    """All values with the number of their records, if there are several."""
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{value} ({count} records)" for value, count in counts.most_common(MAX_VALUES)]
    return ", ".join([*shown, *([f"and {len(counts) - MAX_VALUES} more"] if len(counts) > MAX_VALUES else [])])
