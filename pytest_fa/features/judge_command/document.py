"""The document that `python -m pytest_fa judge --json` prints, and its JSON Schema.

Within one major version, fields are only added; the words of `status` and their exit statuses do not change.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from pytest_fa.catalog.variant import Device
from pytest_fa.features.ncu.nsight_report import BoundBy
from pytest_fa.records.checks import Bound, Index
from pytest_fa.records.outcome import UNDECIDED_STATUS, Defect, Outcome
from pytest_fa.records.ranges import Natural, Real, Seconds, Us
from pytest_fa.records.record import Environment, RecordKind, Source

VERSION = "1.0"


class Status(StrEnum):
    """What the command says: the defect of the variant, or what the gate or this machine made of it."""

    FASTER = "faster"
    WRONG = Defect.WRONG
    NOT_BUILT = Defect.NOT_BUILT
    REFUSED = Defect.REFUSED
    CRASHED = Defect.CRASHED
    HUNG = Defect.HUNG
    SLOWER = "slower"
    USAGE = "usage"
    MACHINE = "machine"
    UNDECIDED = "undecided"
    CHEAT = Defect.CHEAT


EXIT_STATUSES = {
    **dict.fromkeys(Status, 1),
    Status.FASTER: 0,
    Status.SLOWER: 3,
    Status.USAGE: 4,
    Status.MACHINE: 5,
    Status.UNDECIDED: UNDECIDED_STATUS,
    Status.CHEAT: 20,
}


class JudgedRatio(msgspec.Struct, frozen=True):
    """The time of the variant divided by that of a baseline at one shape, with the two ends of the interval.

    A number that is not finite is null.
    """

    shape: str
    baseline: str
    value: Real | None
    low: Real | None
    high: Real | None
    confidence: float


class JudgedChecks(msgspec.Struct, frozen=True):
    """How many cases and properties were judged, and why tests did not run: the reason, and the number of tests."""

    passed: Natural
    failed: Natural
    not_run: dict[str, Natural]


class FailurePlace(msgspec.Struct, frozen=True):
    """Where the output is wrong.  Indices are batch, head, query and dim; `error_map` is a picture of it in letters."""

    bad_count: Natural
    element_count: Natural
    first_bad: Index | None
    worst: Index | None
    worst_got: Real | None
    worst_want: Real | None
    error_map: tuple[str, ...]


class JudgedFailure(msgspec.Struct, frozen=True):
    """The first failure: the test, the checks that caught it, the place, the likely cause, and pytest's command.

    `bounds` are those of the tolerance policy, which `policy` names.
    """

    kind: RecordKind
    id: str
    outcome: Outcome
    checks: tuple[str, ...]
    message: str
    case: str | None
    policy: str | None
    bounds: tuple[Bound, ...]
    place: FailurePlace | None
    cause: str
    pytest_command: str


class ShapeTime(msgspec.Struct, frozen=True):
    """The times of the variant and of the baselines at one shape, in microseconds per call, before the gate."""

    shape: str
    candidate_us: Us | None
    baselines_us: dict[str, Us]


class ComparedCounter(msgspec.Struct, frozen=True):
    """One hardware counter of the variant's longest kernel, and of the baseline's."""

    label: str
    candidate: Real
    baseline: Real


class JudgedBottleneck(msgspec.Struct, frozen=True):
    """What decides the time at one shape: counters of the longest kernel, beside those of the baseline's."""

    shape: str
    kernel: str
    bound_by: BoundBy
    sentence: str
    counters: dict[str, Real]
    baseline: str | None
    beside: tuple[ComparedCounter, ...]


class JudgeDocument(msgspec.Struct, frozen=True):
    """The verdict on one variant.

    `reason` is the verdict in one sentence.  `ratio` is the largest one of `ratios`; the status is `faster` if all of
    them are certainly below `required_ratio`.  `not_judged` has a line for what the manifest claims to support and no
    case has judged; it is empty after a failure, which ends the run.  `failure` is null unless something failed.
    `bottlenecks` is empty without `--ncu`.  `records` is the path of the file with everything that was measured; null
    if nothing was.  `tolerance` is the policy of the caller.  `own_tolerance` is what the variant's own manifest
    declares about how it is judged: a policy or a truth there has no effect, `rounds` have one.
    """

    schema_version: Annotated[str, msgspec.Meta(pattern=r"^1\.[0-9]+$")]
    status: Status
    exit_status: Natural
    reason: str
    variant: str | None
    device: Device | None
    required_ratio: Real
    ratio: JudgedRatio | None
    ratios: tuple[JudgedRatio, ...]
    checks: JudgedChecks
    not_judged: tuple[str, ...]
    failure: JudgedFailure | None
    times: tuple[ShapeTime, ...]
    bottlenecks: tuple[JudgedBottleneck, ...]
    next_steps: tuple[str, ...]
    rerun_command: str
    seconds: Seconds
    records: str | None
    environment: Environment | None
    source: Source | None
    pytest_fa: str
    tolerance: str = "same_precision"
    own_tolerance: str = ""


def schema() -> dict[str, Any]:
    """The JSON Schema of the document.  The words of a field stand in the field, as in the first version."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    document = msgspec.json.schema(JudgeDocument)
    words = {f"#/$defs/{enum.__name__}": document["$defs"].pop(enum.__name__)["enum"] for enum in (Outcome, Status)}
    for definition in document["$defs"].values():
        for name, field in definition["properties"].items():
            if field.get("$ref") in words:
                definition["properties"][name] = {"enum": words[field["$ref"]]}
    return {**dialect, "title": f"pytest_fa judge {VERSION}", **document}


def schema_text() -> str:
    """The JSON Schema as it is published."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"
