"""Records in the formats of other tools.  Each export is a pure function of records.

- `csv`: one row for each record, for spreadsheets and data frames.
- `github-action-benchmark`: the JSON of its tool `customSmallerIsBetter`.
- `perfetto`: a trace of the run in the Trace Event Format, for ui.perfetto.dev: where the time went.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Timing
from pytest_fa.table.slowest_stages import seconds_by_part


class FlatRow(msgspec.Struct, frozen=True):
    """One record as a flat row; a figure that was not measured is None."""

    id: str
    kind: str
    variant: str
    role: str
    shape_id: str | None
    seed: int | None
    dtype: str | None
    outcome: str
    message: str
    max_abs_error: float | None
    rms_error: float | None
    tightest_bound: str | None
    tightest_value: float | None
    tightest_allowed: float | None
    device_us: float | None
    cold_us: float | None
    call_us: float | None
    launch_overhead_us: float | None
    profiler_us: float | None
    time_is_confirmed: bool | None
    registers_per_thread: int | None
    spill_bytes: int | None
    workspace_bytes: int | None
    peak_bytes: int | None
    code_identity: str | None
    gate_verdict: str | None
    gate_ratio: float | None
    seconds: float
    gpu: str | None
    driver: str | None
    torch: str | None
    commit: str | None
    measured_at: str
    rerun_command: str


def flat_row(record: Record) -> FlatRow:
    """Return the row of one record."""
    case, check, speed, gate = record.case, record.check, record.speed, Gate.of(record)
    kernels = [kernel for build in record.builds for kernel in build.kernels]
    bound = check.tightest if check else None
    return FlatRow(
        id=record.id,
        kind=record.kind,
        variant=record.variant,
        role=record.role,
        shape_id=case.shape_id if case else None,
        seed=case.seed if case else None,
        dtype=case.dtype if case else None,
        outcome=record.outcome,
        message=record.message,
        max_abs_error=check.max_abs_error if check else None,
        rms_error=check.rms_error if check else None,
        tightest_bound=bound.name if bound else None,
        tightest_value=bound.value if bound else None,
        tightest_allowed=bound.allowed if bound else None,
        device_us=speed.device.median_us if speed else None,
        cold_us=speed.cold.median_us if speed and speed.cold else None,
        call_us=speed.call.median_us if speed else None,
        launch_overhead_us=speed.launch_overhead_us if speed else None,
        profiler_us=speed.profiler.profiler_us if speed and speed.profiler else None,
        time_is_confirmed=speed.agreement.valid if speed and speed.agreement else None,
        registers_per_thread=max((kernel.registers_per_thread for kernel in kernels), default=None),
        spill_bytes=sum(kernel.spill_bytes for kernel in kernels) if kernels else None,
        workspace_bytes=record.workspace_bytes,
        peak_bytes=record.peak_bytes,
        code_identity=record.builds[0].code_identity if len(record.builds) == 1 else None,
        gate_verdict=gate.verdict if gate else None,
        gate_ratio=gate.ratio if gate else None,
        seconds=sum(stage.seconds for stage in record.stages),
        gpu=record.environment.gpu,
        driver=record.environment.driver,
        torch=record.environment.torch,
        commit=record.source.commit,
        measured_at=record.measured_at,
        rerun_command=record.rerun_command,
    )


def to_csv(records: Sequence[Record]) -> bytes:
    """Return one line for each record after a line with the names of the columns.

    A spreadsheet would execute a text that begins with =, +, - or @, so such a text gets a leading apostrophe.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(FlatRow.__struct_fields__)
    for record in records:
        writer.writerow([_without_formula(value) for value in msgspec.structs.astuple(flat_row(record))])
    return text.getvalue().encode()


def to_github_action_benchmark(records: Sequence[Record]) -> bytes:
    """Return the JSON of github-action-benchmark's `customSmallerIsBetter`: `device_us` of every timed record.

    `range` is the standard deviation of the samples.  The action only draws; whether a kernel is slower is decided by
    `--fa-gate`.
    """
    entries = [
        {
            "name": f"{record.variant} {_shape(record)} device_us",
            "unit": "us",
            "value": timing.median_us,
            "range": f"{_sd(timing):.3g}",
            "extra": f"{record.environment.gpu or record.environment.cpu}\n{record.rerun_command}",
        }
        for record, timing in _timed(records)
    ]
    return _json(entries)


def to_perfetto(records: Sequence[Record]) -> bytes:
    """Return a trace with one track for the stages of all records, and one for the kernels of one call of each.

    A record has the second in which it was made and the seconds of its stages, of its waits and of the start of its
    processes.  They are drawn one after another and end at that second, or later if the record before it ends later.
    A call's kernels, as the profiler saw them, begin with stage `speed`; their lengths are true, their gaps are not
    known.
    """
    by_time = sorted(records, key=lambda record: record.measured_at)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "pytest-fa"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "stages"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "kernels of one call (profiler)"}},
    ]
    origin_us = min((_start_us(record) for record in by_time), default=0.0)
    cursor_us = 0.0
    for record in by_time:
        cursor_us = max(cursor_us, _start_us(record) - origin_us)
        events += _events(record, cursor_us)
        cursor_us += _length_us(record)
    return _json({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(record: Record, start_us: float) -> Iterator[dict[str, Any]]:
    """One slice for the record, within it one for each of its parts, and one for each kernel of its call."""
    arguments = {"outcome": record.outcome, "rerun": record.rerun_command}
    states: dict[str, str] = {stage.name: stage.state for stage in record.stages}
    yield _slice(f"{record.kind} {record.id}", start_us, _length_us(record), 1, arguments)
    for name, seconds in _parts(record):
        if name == "speed" and record.speed and record.speed.profiler:
            node_us = start_us
            for node in record.speed.profiler.nodes:
                yield _slice(node.name, node_us, node.mean_us * node.count, 2, {"record": record.id})
                node_us += node.mean_us * node.count
        if seconds:
            yield _slice(name, start_us, 1e6 * seconds, 1, {"state": states[name]} if name in states else {})
            start_us += 1e6 * seconds


def _slice(name: str, start_us: float, length_us: float, track: int, arguments: dict[str, str]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start_us, "dur": length_us, "pid": 1, "tid": track, "args": arguments}


def _start_us(record: Record) -> float:
    return 1e6 * datetime.fromisoformat(record.measured_at).timestamp() - _length_us(record)


def _length_us(record: Record) -> float:
    return 1e6 * sum(seconds for _, seconds in _parts(record))


def _parts(record: Record) -> Iterable[tuple[str, float]]:
    """The parts of a record with their seconds.  Those of a build belong to the record of the build only."""
    if record.kind == "build":
        return [(stage.name, stage.seconds) for stage in record.stages]
    return seconds_by_part(record)


def _timed(records: Sequence[Record]) -> Iterator[tuple[Record, Timing]]:
    """The records with a time that counts: their outputs are right, and the time is not known to be wrong."""
    for record in records:
        speed = record.speed
        if speed and record.outcome == Outcome.OK and not is_unconfirmed(speed):
            yield record, speed.device


def _shape(record: Record) -> str:
    return record.case.shape_id if record.case else record.id


def _sd(timing: Timing) -> float:
    return statistics.stdev(timing.samples_us) if len(timing.samples_us) > 1 else 0.0


def _without_formula(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


EXPORTS: dict[str, Callable[[Sequence[Record]], bytes]] = {
    "csv": to_csv,
    "github-action-benchmark": to_github_action_benchmark,
    "perfetto": to_perfetto,
}
