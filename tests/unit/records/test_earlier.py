"""Records of earlier schemas: all saved lines are read, old fields and values are renamed, old attributes warn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.gate.noise import NAME as NOISE_NAME
from pytest_fa.features.gate.noise import noise_path, read_noise
from pytest_fa.records.checks import CrossCheck, Diagnosis, Repeats
from pytest_fa.records.earlier import FIELDS
from pytest_fa.records.gated import Gate, GatePair
from pytest_fa.records.log import read_records
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.read import read_record
from pytest_fa.records.record import SCHEMA, Ablation, Record, to_builtins
from pytest_fa.records.timing import NodeTime, ProfilerTime
from pytest_fa.records.tool_results import Bottleneck, CountedKernel, NsightReport, Sanitized, SourceLine
from tests.factories import CHECK, RECORD, RECORDED, SPEED

PROFILES = Path(__file__).parents[3] / "profiles"
SAVED = sorted((PROFILES / "nvidia-h200").glob("*.jsonl"))
SCHEMA_3 = RECORDED / "earlier" / "record.json"

COUNTED = CountedKernel(
    name="kernel<fp16, 64>",
    counters={"gpu__time_duration.sum": 9000.0},
    bottleneck=Bottleneck("latency", "no unit is busy", {"sm__throughput": 21.5}),
    lines=(SourceLine("kernel.cu", 12, 40, "softmax"),),
    phases={"softmax": 40},
)
# The content of record.json, in the names of schema 4 and later.
UPGRADED = msgspec.structs.replace(
    RECORD,
    schema=4,
    role="overhead",
    caught_by=("delegation", "max"),
    check=CHECK,
    repeats=Repeats(100, 3, 17, (0, 7, 64, 0), "cuda.bindings is not installed"),
    diagnosis=Diagnosis(("#..",), "a tail", (CrossCheck("sdpa_math", True, 0.001, None),), "the kernel is wrong"),
    speed=msgspec.structs.replace(
        SPEED,
        agreement=None,
        launch_overhead_us=0.75,
        profiler=ProfilerTime(10.5, -1.25, (NodeTime("kernel", 10.5, 1),), 0),
        profiler_missing="not run",
        other_gpu_processes=("77 train.py",),
    ),
    gate=Gate(
        ratio=1.0,
        verdict="PASS",
        reason="0.90",
        processes=6,
        seed=0,
        dropped_blocks=0,
        detectable=0.01,
        process_sd=0.002,
        seconds=20.0,
        pilot_us={"b1h8s512d64-fp16": {"sdpa_cudnn": 10.0}},
        pairs=(
            GatePair(PairSamples("b1h8s512d64-fp16", "sdpa_cudnn", ((-0.1,),), ((0.01,),)), 0.9, 0.8, 1.0, 0.85, 0.95),
        ),
    ),
    nsight=NsightReport(
        status="ok",
        message="",
        preset="verdict",
        tool="ncu 2025.3.1",
        seconds=4.0,
        command=("ncu",),
        kernels=(COUNTED,),
        baseline="sdpa_cudnn",
        baseline_missing="not profiled",
        baseline_kernels=(COUNTED,),
    ),
    sanitized=Sanitized("racecheck", "suppressed", "1 of 1 hazards", "2025.3.1", 2.0, ("compute-sanitizer",), 1),
    ablation=Ablation("softmax", "cluster_latency"),
)


def schema_3() -> dict[str, Any]:
    """Return a JSON object of schema 3 that has every renamed field and value."""
    content: dict[str, Any] = json.loads(SCHEMA_3.read_text(encoding="utf-8"))
    return content


# -- saved files ------------------------------------------------------------------------------------------------------


def test_there_are_saved_records() -> None:
    """The repository has saved records of an NVIDIA H200."""
    assert SAVED


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_every_saved_line_is_read(path: Path) -> None:
    """Each line of a saved file is read with its builds; one of schema 3 gets the names and the number of schema 4."""
    lines = path.read_bytes().splitlines()
    records = [read_record(line) for line in lines]
    assert [record.schema for record in records] == [max(4, json.loads(line)["schema"]) for line in lines]
    assert [json.loads(line)["id"] for line in lines] == [record.id for record in records]
    assert len(read_records(path)) == len(lines)


def test_saved_noise_is_read() -> None:
    """The saved noise.json is read, and each pair has the samples of its A/A control."""
    noise = read_noise(PROFILES, "NVIDIA H200")
    assert noise is not None
    assert all(len(pair.control) == noise.processes for pair in noise.pairs)


def test_old_fields_of_noise_are_renamed(tmp_path: Path) -> None:
    """A noise.json with old field names gives the same noise as one with the current names."""
    noise = read_noise(PROFILES, "NVIDIA H200")
    assert noise is not None
    current, (old_name,) = to_builtins(noise), FIELDS[PairSamples]
    content = {**current, "pairs": [{**pair, old_name: pair["control"]} for pair in current["pairs"]]}
    for pair in content["pairs"]:
        del pair["control"]
    path = noise_path(tmp_path, "NVIDIA H200")
    path.parent.mkdir()
    path.write_text(json.dumps(content), encoding="utf-8")
    assert path.name == NOISE_NAME
    assert read_noise(tmp_path, "NVIDIA H200") == noise


# -- fields and values ------------------------------------------------------------------------------------------------


def test_an_object_of_schema_3_is_read_with_the_current_names() -> None:
    """All renamed fields and values of a schema 3 object are read as the current ones."""
    assert read_record(schema_3()) == UPGRADED


def test_a_line_of_schema_3_is_read_like_its_object() -> None:
    """A line of schema 3 gives the same record, from bytes and from text."""
    line = json.dumps(schema_3())
    assert [read_record(line.encode()), read_record(line)] == [UPGRADED, UPGRADED]


def test_every_renamed_field_is_in_the_object() -> None:
    """The recorded object has each old field name that `FIELDS` lists, so the tests above cover all of them."""
    text = SCHEMA_3.read_text(encoding="utf-8")
    missing = [old for names in FIELDS.values() for old in names if f'"{old}":' not in text]
    assert missing == []


@pytest.mark.parametrize("schema", [2, SCHEMA + 1, None, "3"])
def test_another_schema_is_refused(schema: object, snapshot: SnapshotAssertion) -> None:
    """A record of another schema is refused with the schema found and those that are supported."""
    with pytest.raises(msgspec.ValidationError) as problem:
        read_record(json.dumps({**schema_3(), "schema": schema}))
    assert snapshot == str(problem.value)


@pytest.mark.parametrize("field", ["role", "caught_by"])
@pytest.mark.parametrize("value", [{"a": 1}, [[]], [{}], 1])
def test_a_value_of_another_type_is_refused(field: str, value: object) -> None:
    """A line of schema 3 that has an object or a list in place of a renamed text is refused."""
    with pytest.raises(msgspec.ValidationError):
        read_record(json.dumps({**schema_3(), field: value}))


# -- old attributes ---------------------------------------------------------------------------------------------------

ATTRIBUTES = [(struct, old, new) for struct, names in FIELDS.items() for old, new in names.items()]


def parts_of(value: object) -> list[msgspec.Struct]:
    """Return all structs inside a value, the value included."""
    if isinstance(value, msgspec.Struct):
        fields = (getattr(value, name) for name in value.__struct_fields__)
        return [value, *(part for field in fields for part in parts_of(field))]
    return [part for item in value for part in parts_of(item)] if isinstance(value, tuple) else []


@pytest.mark.parametrize(("struct", "old", "new"), ATTRIBUTES, ids=[f"{s.__name__}.{old}" for s, old, _ in ATTRIBUTES])
def test_an_old_attribute_gives_the_new_one(struct: type[msgspec.Struct], old: str, new: str) -> None:
    """Reading an old attribute returns the new one's value, with a warning that gives the new name."""
    part = next(part for part in parts_of(UPGRADED) if isinstance(part, struct))
    with pytest.warns(DeprecationWarning, match=rf"^{struct.__name__}\.{old} is now called {struct.__name__}\.{new}$"):
        value = getattr(part, old)
    assert value is getattr(part, new)


def test_the_old_names_of_a_record_are_those_of_schema_3() -> None:
    """The old attributes of `Record` are the fields of schema 3 that the current `Record` does not have."""
    assert set(FIELDS[Record]) == set(schema_3()) - set(Record.__struct_fields__)
