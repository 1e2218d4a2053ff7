"""Records in the formats of other tools, each read as that tool reads it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.__main__ import main
from pytest_fa.features.export.export_formats import (
    EXPORTS,
    FlatRow,
    to_csv,
    to_github_action_benchmark,
    to_perfetto,
)
from pytest_fa.records.costs import Costs
from pytest_fa.records.files import read_record_file
from pytest_fa.records.record import Stage, to_json
from pytest_fa.records.timing import Agreement, NodeTime, ProfilerTime
from tests.factories import RECORD, record, speed

MEASURED = read_record_file(Path(__file__).parents[3] / "profiles/nvidia-h200/cluster_latency.jsonl").records
SPEED = msgspec.structs.replace(speed(10.0), profiler=ProfilerTime(9.0, 0.1, (NodeTime("k", 3.0, 3),), 0))
TIMED = record("mine", kind="speed", speed=SPEED, stages=(Stage("launch", "ok", 0.5), Stage("speed", "ok", 1.5)))


def test_csv() -> None:
    """Python's reader finds one row for each record, with every column, and the figures of the record."""
    rows = list(csv.DictReader(io.StringIO(to_csv(MEASURED).decode(), newline="")))
    assert len(rows) == len(MEASURED)
    assert tuple(rows[0]) == FlatRow.__struct_fields__
    times = [each.speed.device.median_us for each in MEASURED if each.speed]
    assert [float(row["device_us"]) for row in rows if row["device_us"]] == times


@pytest.mark.parametrize("message", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)"])
def test_csv_has_no_formulas(message: str) -> None:
    """A text that a spreadsheet would execute is marked as a text."""
    (row,) = csv.DictReader(io.StringIO(to_csv([record(message=message)]).decode(), newline=""))
    assert row["message"] == f"'{message}"


def test_github_action_benchmark() -> None:
    """Each entry has the fields of `customSmallerIsBetter` with the types that the action checks."""
    entries = json.loads(to_github_action_benchmark(MEASURED))
    assert len({entry["name"] for entry in entries}) == len(entries) > 10
    for entry in entries:
        assert {key: type(value) for key, value in entry.items()} == {
            "name": str,
            "unit": str,
            "value": float,
            "range": str,
            "extra": str,
        }


def _slices(trace: bytes, track: int) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X" and event["tid"] == track]


def test_perfetto() -> None:
    """The trace has a slice for the record, its stages within it, and the kernels of one call."""
    stages = [(each["name"], each["ts"], each["dur"]) for each in _slices(to_perfetto([TIMED]), 1)]
    assert stages == [(f"speed {TIMED.id}", 0.0, 2e6), ("launch", 0.0, 0.5e6), ("speed", 0.5e6, 1.5e6)]
    assert [(each["name"], each["ts"], each["dur"]) for each in _slices(to_perfetto([TIMED]), 2)] == [("k", 0.5e6, 9.0)]


def test_perfetto_shows_what_is_in_no_stage() -> None:
    """The wait, the start of the processes and the profiler are slices around those of the stages."""
    timed = msgspec.structs.replace(TIMED, costs=Costs(0.25, 3.0, 4.0))
    stages = [(each["name"], each["ts"], each["dur"]) for each in _slices(to_perfetto([timed]), 1)[1:]]
    assert stages == [
        ("wait for other timings", 0.0, 0.25e6),
        ("start of processes, import of torch", 0.25e6, 1e6),
        ("launch", 1.25e6, 0.5e6),
        ("speed", 1.75e6, 1.5e6),
        ("profiler", 3.25e6, 4e6),
    ]


def test_perfetto_slices_nest() -> None:
    """On one track, slices follow or contain each other and never overlap, and no time is negative."""
    open_ends: list[float] = []
    for event in _slices(to_perfetto(MEASURED), 1):
        start, end = event["ts"], event["ts"] + event["dur"]
        assert min(start, event["dur"]) >= 0
        while open_ends and open_ends[-1] <= start + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3
        open_ends.append(end)


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_wrong_and_unconfirmed_times_are_no_metrics(name: str) -> None:
    """The time of a wrong kernel and a time that is not confirmed are in no metric; no records are no error."""
    unconfirmed = msgspec.structs.replace(SPEED, agreement=Agreement(valid=False, reason="clocks"))
    records = [RECORD, msgspec.structs.replace(TIMED, speed=unconfirmed)]
    if name == "github-action-benchmark":
        assert len(json.loads(EXPORTS[name](records))) == 0
    assert EXPORTS[name]([])


def test_the_command(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """`export` writes to a file, or to stdout without -o, and names the formats for any other word."""
    (tmp_path / "run.jsonl").write_bytes(to_json(TIMED) + b"\n")
    assert main(["export", str(tmp_path / "run.jsonl"), "--format=csv", "-o", str(tmp_path / "x.csv")]) == 0
    assert (tmp_path / "x.csv").read_bytes() == to_csv([TIMED])
    assert main(["export", str(tmp_path / "run.jsonl"), "--format=perfetto"]) == 0
    assert capsysbinary.readouterr().out == to_perfetto([TIMED])
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run.jsonl"), "--format=xml"])
    assert b"perfetto" in capsysbinary.readouterr().err
