"""Old names of record fields and values: lines of schema 3 are read with them, and old attributes still work.

Schema 4 renamed fields and some values.  Since schema 5, a time on a GPU is confirmed by the judge's clock as well; a
record keeps the number 4 when it is read, because its time is judged without that clock.  In the package `records`, old
names are only in this module.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import inspect

from pytest_fa.earlier import POLICIES, ROLES, with_old_attributes
from pytest_fa.records.checks import Bound, Check, Diagnosis, Repeats
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Ablation, Record
from pytest_fa.records.timing import ProfilerTime, Speed
from pytest_fa.records.tool_results import CountedKernel, NsightReport, Sanitized, SourceLine

EARLIEST_SCHEMA = 3
CURRENT_NAMES_SCHEMA = 4  # the first one with the current names
OUTSIDE_SCHEMA = 5  # the first one whose times on a GPU have the judge's clock

FIELDS: dict[type[msgspec.Struct], dict[str, str]] = {
    Record: {"leaves": "builds", "repeat": "rerun_command", "profile": "nsight"},
    Check: {
        "yardstick_max_error": "same_precision_max_error",
        "yardstick_rms_error": "same_precision_rms_error",
    },
    Bound: {"judged": "enforced"},
    Repeats: {"dirt_missing": "why_no_smem_poison"},
    Diagnosis: {"witnesses": "cross_checks", "who_is_off": "conclusion"},
    Speed: {
        "floor_us": "launch_overhead_us",
        "busy": "profiler",
        "busy_missing": "profiler_missing",
        "neighbours": "other_gpu_processes",
    },
    ProfilerTime: {"busy_us": "profiler_us", "overhead_us": "clock_offset_us"},
    PairSamples: {"same": "control"},
    Ablation: {"stage": "phase"},
    NsightReport: {
        "beside": "baseline",
        "beside_missing": "baseline_missing",
        "beside_kernels": "baseline_kernels",
    },
    CountedKernel: {"verdict": "bottleneck", "stages": "phases"},
    SourceLine: {"stage": "phase"},
}

# Old values to new ones, by the struct and the new name of the field that holds them.
VALUES: dict[tuple[type[msgspec.Struct], str], dict[str, str]] = {
    (Record, "role"): ROLES,
    (Record, "caught_by"): {"own work": "delegation"},
    (Check, "policy"): POLICIES,
    (Sanitized, "status"): {"explained": "suppressed"},
}


def upgrade_record(data: dict[str, Any]) -> dict[str, Any]:
    """Return a record's JSON object of schema 3 with the current names; its `schema` number does not change."""
    upgraded: dict[str, Any] = _upgrade(data, _type_of(Record))
    return upgraded


def upgrade_noise(data: Any) -> Any:  # noqa: ANN401  # JSON
    """Return the JSON object of a `noise.json`, written by any version, with the current names.

    Anything else is returned unchanged.
    """
    if not isinstance(data, dict) or not isinstance(data.get("pairs"), list):
        return data
    return {**data, "pairs": [_upgrade(pair, _type_of(PairSamples)) for pair in data["pairs"]]}


@functools.cache
def _type_of(struct: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(struct)


def _upgrade(data: Any, kind: inspect.Type) -> Any:  # noqa: ANN401  # JSON
    if isinstance(kind, inspect.StructType) and isinstance(data, dict):
        return _upgrade_struct(data, kind)
    if isinstance(kind, inspect.VarTupleType) and isinstance(data, list):
        return [_upgrade(item, kind.item_type) for item in data]
    if isinstance(kind, inspect.UnionType):
        structs = [member for member in kind.types if isinstance(member, inspect.StructType)]
        return _upgrade(data, structs[0]) if structs else data
    return data


def _upgrade_struct(data: dict[str, Any], kind: inspect.StructType) -> dict[str, Any]:
    names, types = FIELDS.get(kind.cls, {}), {field.name: field.type for field in kind.fields}
    upgraded = {}
    for old, value in data.items():
        name = names.get(old, old)
        new_values = VALUES.get((kind.cls, name))
        if new_values is not None:
            items = value if isinstance(value, list) else [value]
            renamed = [new_values.get(item, item) if isinstance(item, str) else item for item in items]
            upgraded[name] = renamed if isinstance(value, list) else renamed[0]
        else:
            upgraded[name] = _upgrade(value, types[name]) if name in types else value
    return upgraded


for _struct, _names in FIELDS.items():
    with_old_attributes(_names)(_struct)
