"""The slowest stages of a run, which -v shows."""

from __future__ import annotations

import msgspec
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.gate.gated import Gate, GatePair
from pytest_fa.records.costs import Costs
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record, Stage
from pytest_fa.table.rows import make_rows
from pytest_fa.table.slowest_stages import MAX_LINES, seconds_by_part, slowest_stage_lines
from tests.factories import BUILD, record

PARTS = {"processes": 0.5, "samples": 2.0}
GATE = Gate(0.95, "PASS", "", 6, 1, 0, 0.01, None, 20.0, {}, (), pilot_seconds=4.5, part_seconds=PARTS)


def seconds_of(one: Record) -> dict[str, float]:
    """The parts of a record that took time."""
    return {name: seconds for name, seconds in seconds_by_part(one) if seconds}


def test_the_lines_of_a_run(snapshot: SnapshotAssertion) -> None:
    """The slowest stages come first, those of baselines are apart, and each has its share of all seconds."""
    stages = (Stage("build", "ok", 100.0), Stage("launch", "ok", 0.25), Stage("speed", "ok", 4.0))
    records = [record(kind="speed", role=role, stages=stages) for role in ("candidate", "baseline", "overhead")]
    assert snapshot == slowest_stage_lines(records, 12.5)


def test_few_lines() -> None:
    """Of many stages the slowest are shown; a run in which nothing took time has no lines."""
    timed = record(kind="gate", added={"gate": GATE}, stages=(Stage("launch", "ok", 1.0),), costs=Costs(2.0, 3.0, 4.0))
    assert 1 + MAX_LINES == len(slowest_stage_lines([timed], 1.0))
    assert [] == slowest_stage_lines([record()], 0.0)


def test_wait_start_and_profiler_are_parts_of_a_timing() -> None:
    """The job outside its stages, the first calls, the profiler and the wait are parts; a build is none."""
    stages = (Stage("build", "ok", 100.0), Stage("launch", "ok", 0.25), Stage("speed", "ok", 1.0))
    timed = record(kind="speed", stages=stages, costs=Costs(2.0, 1.75, 3.0), compile_seconds=0.125)
    assert {
        "wait for other timings": 2.0,
        "start of processes, import of torch": 0.375,
        "first calls, which compile": 0.125,
        "launch": 0.25,
        "speed": 1.0,
        "profiler": 3.0,
    } == seconds_of(timed)


def test_the_parts_of_a_gate() -> None:
    """The pilot and the parts of all processes are parts of a gate; an older record has none of them."""
    older = msgspec.structs.replace(GATE, pilot_seconds=0.0, part_seconds={})
    expected = {"gate: pilot": 4.5, "gate: start and end of processes": 3.0, "gate: timed samples": 12.0}
    assert expected == seconds_of(record(kind="gate", added={"gate": GATE}))
    assert {} == seconds_of(record(kind="gate", added={"gate": older}))


def test_processes_on_several_gpus_run_side_by_side() -> None:
    """Of a gate on three GPUs, the seconds of the processes of one GPU count."""
    gpus = ("a", "b", "c") * 6
    pair = GatePair(PairSamples("b1h8s512d64-fp16", "fast", (), (), gpus=gpus), 0.9, 0.8, 1.0, 0.8, 1.0)
    gate = msgspec.structs.replace(GATE, processes=18, pairs=(pair,))
    assert 12.0 == seconds_of(record(kind="gate", added={"gate": gate}))["gate: timed samples"]


def test_a_shared_compilation_counts_once() -> None:
    """Of the builds that one compilation made for several variants, one counts its seconds, and all show them."""
    names = ("one", "two")
    shared = [msgspec.structs.replace(BUILD, variant=name, shared_by=names, build_seconds=8.0) for name in names]
    alone = msgspec.structs.replace(BUILD, variant="three", key="another", build_seconds=1.0)
    records = [record(build.variant, kind="build", builds=(build,)) for build in (*shared, alone)]
    assert [8.0, 0.0, 1.0] == [build.counted_seconds for build in (*shared, alone)]
    assert ["8.0 shared", "8.0 shared", "1.0"] == [row.build_seconds for row in make_rows(records)]
