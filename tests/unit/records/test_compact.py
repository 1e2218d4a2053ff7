"""Compact lines: records are read back equal, what they share is written once, and a line says what differs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.records.checks import Bound, Check, Repeats
from pytest_fa.records.compact import USUAL, compact_lines
from pytest_fa.records.costs import Costs
from pytest_fa.records.files import read_stream
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record, Stage, to_json
from tests.factories import BARE, BUILD, CHECK, RECORD, SPEED, record

PROFILES = Path(__file__).parents[3] / "profiles"
SAVED = sorted(PROFILES.glob("*/*.jsonl"))


def written(*records: Record) -> list[dict[str, Any]]:
    """The compact lines of records as JSON objects."""
    return [json.loads(line) for line in compact_lines(records)]


def read_back(*records: Record) -> tuple[Record, ...]:
    """The records of the compact lines of records."""
    file = read_stream(Path("x"), io.BytesIO(b"".join(compact_lines(records))))
    assert (file.complaint, file.path) == ("", Path("x"))
    return file.records


# -- single records ---------------------------------------------------------------------------------------------------

COMMANDS = (
    "pytest",
    "pytest --fa-variant=mine --fa-case=b1h8s512d64-fp16-seed0 -k 'mine and test_correct'",
    "pytest --fa-variant=mine2 --fa-kernels=not_mine,mine-too --fa-case=b1h8s512d64-fp16-seed01",
    "pytest --fa-define=X={variant},{case},{{,}} --fa-variant=mine",
)
NAMES = ("mine", "case", "variant", "mine@BLOCK_M=64")


@pytest.mark.parametrize(
    "whole", [RECORD, BARE, record(), record(kind="build")], ids=["full", "bare", "plain", "build"]
)
def test_a_record_is_read_back_equal(whole: Record) -> None:
    """A compact line gives the record that it was made of, alone and with others."""
    assert read_back(whole) == (whole,)
    assert read_back(whole, record(), whole) == (whole, record(), whole)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_rerun_command_is_read_back_equal(command: str, name: str) -> None:
    """The names of variant and case in a command, and braces, are read back as they were."""
    command = command.replace("=mine ", f"={name} ")
    records = [record(name, rerun_command=command), record(name, "b1h2s64d64-fp16-seed3", rerun_command=command)]
    assert [each.rerun_command for each in read_back(*records)] == [command, command]


@pytest.mark.parametrize(
    "changes",
    [{"id": "mine-zeros", "kind": "property"}, {"id": "mine", "kind": "gate", "case": None}, {"id": "x", "case": None}],
    ids=["property", "gate", "another id"],
)
def test_a_case_is_read_back_equal(changes: dict[str, Any]) -> None:
    """The case is right also if the id does not name it."""
    whole = msgspec.structs.replace(record(kind="build"), **{"case": record().case, **changes})
    assert read_back(whole) == (whole,)


def test_a_case_that_no_id_names_is_written_whole() -> None:
    """A case that its own id would not give back is refused as that of a whole line is: there is no such case."""
    case = msgspec.structs.replace(parse_case("b1h8s512d64-fp16-seed0"), data="tiny")
    (line,) = written(msgspec.structs.replace(record(), case=case))
    assert line["case"]["data"] == "tiny"
    file = read_stream(Path("x"), io.BytesIO(json.dumps(line).encode()))
    assert "-tiny need the dtype e4m3" in file.complaint


def test_a_line_has_only_what_is_unusual() -> None:
    """A plain record needs an id, a kind and the time; its case is in the id."""
    *_, line = written(record(), record(case="b1h2s64d64-fp16-seed3"))
    assert line.keys() == {"parts", "id", "kind", "stages", "measured_at"}


def test_bounds_and_stages_are_lists() -> None:
    """A bound that holds has a name and two values; usual values at the end are left out, others are not."""
    bounds = (Bound("max", 1.0, 2.0, True), Bound("rms", 3.0, 2.0, False), Bound("gain", 1.0, 2.0, True, False))
    (line,) = written(record(check=msgspec.structs.replace(CHECK, bounds=bounds)))
    assert line["check"]["bounds"] == [["max", 1.0, 2.0], ["rms", 3.0, 2.0, False], ["gain", 1.0, 2.0, True, False]]
    assert written(RECORD)[0]["stages"] == [["build", "ok", 1.5], ["launch", "failed", 0.25], ["sanity", "not reached"]]


# -- figures ----------------------------------------------------------------------------------------------------------

THIRD = 1 / 3


def test_seconds_are_rounded() -> None:
    """The seconds of stages, of costs and of a compilation have 4 digits."""
    whole = record(stages=(Stage("build", "ok", THIRD),), costs=Costs(THIRD, 100 * THIRD, 0.0), compile_seconds=THIRD)
    (saved,) = read_back(whole)
    assert (saved.stages, saved.compile_seconds) == ((Stage("build", "ok", 0.3333),), 0.3333)
    assert saved.costs == Costs(0.3333, 33.33, 0.0)


def test_the_costs_of_a_gates_pilot_are_read_back_equal() -> None:
    """The costs of a gate's own pilot, deep in a record, are read back as they were."""
    gate = Gate(1.0, "PASS", "", 6, 0, 0, 0.01, None, 20.0, {}, (), pilot_costs=Costs(THIRD, 2.0, 0.0))
    gated = record(kind="gate", added={"gate": gate})
    assert read_back(gated) == (gated,)


def test_figures_are_exact() -> None:
    """Errors, bounds, samples, medians and precisions keep all digits, so that each verdict follows from them."""
    check = msgspec.structs.replace(CHECK, bounds=(Bound("max", THIRD, 2 * THIRD, True),), max_abs_error=THIRD)
    device = msgspec.structs.replace(SPEED.device, samples_us=(THIRD, 2 * THIRD), median_us=THIRD, precision=THIRD)
    timed = record(kind="speed", check=check, speed=msgspec.structs.replace(SPEED, device=device))
    assert read_back(timed) == (timed,)


# -- what records share -----------------------------------------------------------------------------------------------


def test_what_records_share_is_written_once() -> None:
    """The environment, the build and the command of two records are in three lines above the first one."""
    records = [record(builds=(BUILD,), case=f"b1h8s512d64-fp16-seed{seed}") for seed in range(2)]
    *parts, first, second = written(*records)
    assert [set(part) & {"environment", "builds", "rerun_command"} for part in parts] == [
        {"environment"},
        {"builds"},
        {"rerun_command"},
    ]
    assert first["parts"] == second["parts"] == [part["part"] for part in parts]
    assert read_back(*records) == tuple(records)


def test_what_one_record_has_is_in_its_line() -> None:
    """A record that shares nothing is one line."""
    (line,) = written(RECORD)
    assert (line["parts"], line["builds"][0]["variant"]) == ([], BUILD.variant)


def test_a_part_has_the_same_name_in_every_file() -> None:
    """The name depends on the content only, so that files can be joined and a new run changes few lines."""
    one, two = (written(*[record(variant, builds=(BUILD,))] * 2) for variant in ("one", "two"))
    assert [one[0]["part"] == two[0]["part"], one[1]["part"] == two[1]["part"]] == [False, True]


def test_joined_files_are_read() -> None:
    """Two files one after the other are one file."""
    records = [record("one"), record("one"), record("two"), record("two")]
    lines = [*compact_lines(records[:2]), *compact_lines(records[2:]), to_json(RECORD)]
    assert read_stream(Path("x"), io.BytesIO(b"\n".join(lines))).records == (*records, RECORD)


def test_a_part_cannot_change_a_terminal() -> None:
    """Texts of parts are printable, and so is a command that is put together from them."""
    part = {**written(record(), record())[0], "variant": "x::", "role": "\x1b[2J"}
    line = {"parts": [part["part"]], "id": "x", "kind": "build", "stages": [], "measured_at": "now"}
    line |= {"rerun_command": "::error {variant}a"}
    file = read_stream(Path("x"), io.BytesIO(b"\n".join(json.dumps(each).encode() for each in (part, line))))
    (read,) = file.records
    assert (read.role, read.rerun_command) == (r"\x1b[2J", r"\x3a:error x::a")


# -- the saved records of this repository -----------------------------------------------------------------------------


def test_there_are_saved_records() -> None:
    """The repository has saved records."""
    assert SAVED


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_saved_records_are_compact(path: Path) -> None:
    """Each line of a saved file is read, and the records would be written with the same bytes."""
    records = read_records(path)
    assert records
    assert b"".join(compact_lines(records)) == path.read_bytes()


def test_saved_noise_is_read() -> None:
    """The saved noise.json is read, and each pair has the samples of its A/A control."""
    noise = read_noise(PROFILES, "NVIDIA H200")
    assert noise is not None
    assert all(len(pair.control) == noise.processes for pair in noise.pairs)


def test_usual_values_are_those_of_fields_without_a_default() -> None:
    """No field that may be left out has a default and a usual value, which could differ."""
    fields = {kind: msgspec.structs.fields(kind) for kind in (Record, Check, Bound, Repeats)}
    both = [field.name for kind in fields for field in fields[kind] if field.name in USUAL[kind] and not field.required]
    assert both == []
