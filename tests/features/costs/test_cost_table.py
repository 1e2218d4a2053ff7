"""`python -m pytest_fa costs`: where the seconds of recorded runs went."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.__main__ import main
from pytest_fa.features.costs.cost_sides import newest_run, read_cost_side
from pytest_fa.features.costs.cost_table import CostRow, CostSide, cost_markdown, cost_notes, cost_rows
from pytest_fa.records.costs import Costs, RunSeconds, read_run_seconds, run_file_of, write_run_seconds
from pytest_fa.records.gated import Gate, GatePair
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Stage
from pytest_fa.table.rows import make_rows
from tests.factories import BUILD, RECORDED, record

BEFORE, AFTER = (RECORDED / "costs" / f"{name}.jsonl" for name in ("before", "after"))
SAVED = Path(__file__).parents[3] / "profiles" / "nvidia-h200" / "swizzle_async.jsonl"


def side(path: Path) -> CostSide:
    """One recorded run."""
    return read_cost_side(path.name, path.parent)


def seconds_of(rows: list[CostRow]) -> dict[str, float | None]:
    """The seconds by the title of the row."""
    return {row.title: row.seconds for row in rows}


def test_the_table_of_one_run(snapshot: SnapshotAssertion) -> None:
    """A run without the resident server, and what its shares are."""
    assert snapshot(name="costs-one-run") == cost_markdown([side(BEFORE)]) + "\n"


def test_before_and_after(snapshot: SnapshotAssertion) -> None:
    """The same run with torch imported before: the difference of each part."""
    assert snapshot(name="costs-two-runs") == cost_markdown([side(BEFORE), side(AFTER)]) + "\n"


def test_saved_records_of_a_gpu() -> None:
    """Saved records, which several runs may have made, hold the seconds of stages; a note says what they lack."""
    saved = side(SAVED)
    timed = [stage for each in saved.records if each.kind == "speed" for stage in each.stages if stage.name == "speed"]
    expected = pytest.approx(sum(stage.seconds for stage in timed))
    assert expected == seconds_of(cost_rows(saved))["test_speed: stage speed"]
    reason = "there is no swizzle_async.run.json beside the records"
    assert f"Start, collection, fixtures, end and total of the run are not known: {reason}." in cost_notes(saved)


@pytest.mark.parametrize("path", [BEFORE, AFTER], ids=["before", "after"])
def test_the_parts_are_the_whole(path: Path) -> None:
    """The parts of a run add up to its total, and the parts of its tests to their seconds."""
    rows = cost_rows(side(path))
    seconds = seconds_of(rows)
    total = seconds.pop("total")
    assert total == pytest.approx(sum(row.seconds or 0 for row in rows if not row.is_inside and row.title != "total"))
    inside = [row.seconds or 0 for row in rows if row.title.startswith("test_correct: ")]
    assert seconds["test_correct"] == pytest.approx(sum(inside), abs=0.02)


def test_stages_wait_and_profiler_are_parts_of_a_timing() -> None:
    """The job outside its stages, the profiler and the wait are rows of their own; a build's seconds are none."""
    stages = (Stage("build", "ok", 100.0), Stage("launch", "ok", 0.25), Stage("speed", "ok", 1.0))
    timed = record(kind="speed", stages=stages, costs=Costs(2.0, 1.75, 3.0))
    assert seconds_of(cost_rows(CostSide("a run", (timed,), "there is none"))) == {
        "test_speed": 6.75,
        "test_speed: stage launch": 0.25,
        "test_speed: stage speed": 1.0,
        "test_speed: import of torch, start of processes, messages": 0.5,
        "test_speed: profiler": 3.0,
        "test_speed: wait for other timings": 2.0,
    }


def test_baselines_have_a_row_of_their_own() -> None:
    """Timings of baselines and of empty kernels are not those of the variant."""
    stages = (Stage("speed", "ok", 1.0),)
    records = tuple(record(name, kind="speed", role=name, stages=stages) for name in ("candidate", "baseline"))
    seconds = seconds_of(cost_rows(CostSide("a run", records, "there is none")))
    assert (seconds["test_speed"], seconds["timings of baselines"]) == (1.0, 1.0)


def test_a_gate_has_a_row_for_each_part() -> None:
    """The pilot and the parts of all processes are rows; a gate of an older record has only its seconds."""
    parts = {"processes": 0.5, "samples": 2.0}
    gate = Gate(0.95, "PASS", "", 6, 1, 0, 0.01, None, 20.0, {}, (), pilot_seconds=4.5, part_seconds=parts)
    older = msgspec.structs.replace(gate, pilot_seconds=0.0, part_seconds={})
    records = tuple(record(kind="gate", gate=each) for each in (gate, older))
    assert seconds_of(cost_rows(CostSide("a run", records, "there is none"))) == {
        "test_gate": 40.0,
        "test_gate: pilots of gates": 4.5,
        "test_gate: start and end of processes": 3.0,
        "test_gate: timed samples": 12.0,
    }


def test_the_parts_of_a_pilot_are_rows() -> None:
    """The wait, the timings and the profiler of a pilot are rows of the gate, and the rest is the remainder."""
    costs, parts = Costs(1.0, 2.5, 4.0), {"samples": 2.0}
    gate = Gate(
        0.95, "PASS", "", 6, 1, 0, 0.01, None, 20.0, {}, (), pilot_seconds=8.0, part_seconds=parts, pilot_costs=costs
    )
    seconds = seconds_of(cost_rows(CostSide("a run", (record(kind="gate", gate=gate),), "there is none")))
    assert seconds == {
        "test_gate": 20.0,
        "test_gate: wait of pilots for other timings": 1.0,
        "test_gate: timings of pilots": 2.5,
        "test_gate: profiler of pilots": 4.0,
        "test_gate: rest of pilots": 0.5,
        "test_gate: timed samples": 12.0,
    }


def test_processes_on_several_gpus_run_side_by_side() -> None:
    """Of a gate on three GPUs, the seconds of the processes of one GPU count."""
    gpus = ("a", "b", "c") * 6
    pair = GatePair(PairSamples("b1h8s512d64-fp16", "fast", (), (), gpus=gpus), 0.9, 0.8, 1.0, 0.8, 1.0)
    parts = {"samples": 2.0}
    gate = Gate(0.95, "PASS", "", 18, 1, 0, 0.01, None, 20.0, {}, (pair,), part_seconds=parts)
    side_of_gate = CostSide("a run", (record(kind="gate", gate=gate),), "there is none")
    assert seconds_of(cost_rows(side_of_gate))["test_gate: timed samples"] == 12.0


def test_a_shared_compilation_counts_once() -> None:
    """The builds that one compilation made for several variants share its seconds, also where they are shown."""
    names = ("one", "two")
    shared = [msgspec.structs.replace(BUILD, variant=name, shared_by=names, build_seconds=8.0) for name in names]
    alone = msgspec.structs.replace(BUILD, variant="three", key="another", build_seconds=1.0)
    records = tuple(record(build.variant, kind="build", builds=(build,)) for build in (*shared, alone))
    assert cost_notes(CostSide("a run", records, "there is none"))[-1].startswith(
        "3 builds of 2 compilations, each counted once, took 9.0 s of compilers, "
    )
    assert [build.counted_seconds for build in (*shared, alone)] == [8.0, 0.0, 1.0]
    assert [row.build_seconds for row in make_rows(list(records))] == ["8.0 shared", "8.0 shared", "1.0"]


def test_what_is_not_known_is_said(snapshot: SnapshotAssertion) -> None:
    """A record without seconds is no zero, and a note names it."""
    gate = CostSide("a run", (record(kind="gate"),), "there is no a.run.json")
    assert cost_rows(gate) == [CostRow("test_gate", None)]
    assert snapshot == cost_notes(gate)


def test_parallel_tests_are_named() -> None:
    """With pytest-xdist the parts exceed the total: no rest is computed, and a note says so."""
    before = side(BEFORE)
    assert isinstance(before.run, RunSeconds)
    parallel = msgspec.structs.replace(before, run=msgspec.structs.replace(before.run, workers=4))
    assert "pytest between the tests" not in seconds_of(cost_rows(parallel))
    assert "4 processes ran tests side by side, so the parts exceed the total." in cost_notes(parallel)


def test_the_file_of_a_run(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """The seconds of a run survive their file; another schema, a broken and a missing file are reasons."""
    path = tmp_path / "run.jsonl"
    assert snapshot == read_run_seconds(path)
    seconds = read_run_seconds(BEFORE)
    assert isinstance(seconds, RunSeconds)
    write_run_seconds(path, seconds)
    assert read_run_seconds(path) == seconds
    write_run_seconds(path, msgspec.structs.replace(seconds, schema=2))
    assert read_run_seconds(path) == "run.run.json has schema 2, not 1"
    run_file_of(path).write_text('{"schema": 1, "total_seconds": -1}', encoding="utf-8")
    assert re.match("run.run.json cannot be read: ", str(read_run_seconds(path)))


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    """Without arguments it reads the newest run, with two it compares them; three, or no run, are refused."""
    monkeypatch.chdir(tmp_path)
    assert main(["costs"]) == 2
    assert snapshot == capsys.readouterr().err
    records = tmp_path / "artifacts" / "records"
    records.mkdir(parents=True)
    for name, source in (("1.jsonl", BEFORE), ("2.jsonl", AFTER), ("2-watch.jsonl", AFTER)):
        shutil.copy(source, records / name)
        shutil.copy(run_file_of(source), run_file_of(records / name))
    assert newest_run(Path("artifacts")) == "artifacts/records/2.jsonl"
    assert main(["costs"]) == 0
    assert capsys.readouterr().out == cost_markdown([side(records / "2.jsonl")]) + "\n"
    assert main(["costs", "artifacts/records/1.jsonl", "artifacts/records/2.jsonl"]) == 0
    assert capsys.readouterr().out.startswith("| part | 1.jsonl | 2.jsonl | difference |\n")
    assert main(["costs", "a", "b", "c"]) == 2
    assert snapshot == capsys.readouterr().err


def test_a_folder_has_no_run(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A folder may hold several runs, so only the seconds of its records are shown."""
    shutil.copy(BEFORE, tmp_path)
    assert snapshot == read_cost_side(".", tmp_path).run
