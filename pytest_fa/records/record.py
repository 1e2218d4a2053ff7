"""The record types: everything that is written down, in the order of the run that makes it.

A record is one JSON line per case.  A number that was not measured is None, and a `*_missing` text says why.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.records.built import Build
from pytest_fa.records.gated import Gate
from pytest_fa.records.judged import Check, Diagnosis, Repeats
from pytest_fa.records.timing import Speed
from pytest_fa.records.tool_results import NsightReport, Sanitized

SCHEMA = 4

Outcome = Literal[
    "ok",
    "failed",
    "wrong",
    "unsupported",
    "launch_failed",
    "device_error",
    "crashed",
    "hung",
    "not_built",
    "over_limit",
    "gate_failed",
    "inconclusive",
    "not_measured",
    "hazard",
]
StageName = Literal["build", "launch", "sanity", "correct", "speed"]
STAGES: tuple[StageName, ...] = ("build", "launch", "sanity", "correct", "speed")
StageState = Literal["ok", "failed", "not reached"]
RecordKind = Literal["build", "correct", "property", "speed", "selftest", "gate", "profile", "sanitize"]


class Stage(msgspec.Struct, frozen=True):
    """How far a run came: ok, failed, or not reached, and the seconds it took."""

    name: StageName
    state: StageState
    seconds: float = 0.0


class Environment(msgspec.Struct, frozen=True):
    """Where a record was made."""

    gpu: str | None
    compute_capability: str | None
    driver: str | None
    cuda: str | None
    torch: str | None
    python: str
    host: str
    cpu: str
    pytest_fa: str


class Source(msgspec.Struct, frozen=True):
    """The commit the source was at, and whether it had changes; from git, or from the file written before a copy."""

    commit: str | None
    dirty: bool | None
    origin: str


class Ablation(msgspec.Struct, frozen=True):
    """What a variant that computes no attention leaves out, and of whom."""

    phase: str
    parent: str


class Record(msgspec.Struct, frozen=True):
    """One line: one variant on one case (or its build alone).

    `builds` holds the build that ran, or for a build every architecture's.
    """

    schema: int
    id: str
    kind: RecordKind
    variant: str
    role: str
    case: Case | None
    outcome: Outcome
    message: str
    caught_by: tuple[str, ...]
    stages: tuple[Stage, ...]
    builds: tuple[Build, ...]
    check: Check | None
    repeats: Repeats | None
    diagnosis: Diagnosis | None
    speed: Speed | None
    gate: Gate | None
    environment: Environment
    source: Source
    measured_at: str
    rerun_command: str
    nsight: NsightReport | None = None
    sanitized: Sanitized | None = None
    ablation: Ablation | None = None


def to_json(value: msgspec.Struct) -> bytes:
    """One line of JSON without its newline."""
    return msgspec.json.encode(value)


def to_builtins(value: msgspec.Struct) -> Any:  # noqa: ANN401  # JSON-able
    """Dicts, lists and numbers, for the test report that xdist sends along."""
    return msgspec.to_builtins(value)
