"""The manifest of a bundle, `artifacts/manifest.yaml`: what was run, on what, with which result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import yaml

from pytest_fa.catalog.yaml_file import StrictLoader
from pytest_fa.errors import FaError
from pytest_fa.records.built import Build
from pytest_fa.records.outcome import UNDECIDED_STATUS, Outcome
from pytest_fa.records.record import Environment, Record, Source
from pytest_fa.records.written import WrittenRecords

MANIFEST_SCHEMA = 3
MANIFEST = "artifacts/manifest.yaml"
RESULTS = "artifacts/"  # where results are, and no sources


class BundleManifestProblem(FaError):
    """A manifest that cannot be read."""


class BuildFacts(msgspec.Struct, frozen=True):
    """The key and the code identity of one build, and where and when it was built."""

    key: str
    code_identity: str | None
    built_on: str
    built_at: str


class BundleManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a manifest.

    `source_tree` is the id of a git tree with the packed source files; for an unchanged checkout it is that of its
    commit.  `left_out` names source files that were not packed, with the reason.  `records` is the run's record file.
    `written` is what its run says that it wrote, by the process that decided.  `builds` are named by variant and
    architecture, `outcomes` by kind and outcome.
    """

    schema: int
    created: str
    source: Source
    source_tree: str
    left_out: tuple[str, ...]
    environment: Environment
    versions: dict[str, str | None]
    differences_from_constraints: tuple[str, ...]
    compilers: tuple[str, ...]
    builds: dict[str, BuildFacts]
    records: str
    written: WrittenRecords
    pytest_exit_status: int
    outcomes: dict[str, dict[str, int]]


def to_yaml(manifest: BundleManifest) -> str:
    """Return the manifest as YAML, its fields in the order of the type."""
    return yaml.safe_dump(msgspec.to_builtins(manifest), sort_keys=False, allow_unicode=True, width=120)


def read_manifest(content: bytes) -> BundleManifest:
    """Return the manifest of a YAML text.  Raises `BundleManifestProblem` if it is none of this schema."""
    try:
        data = yaml.load(content.decode("utf-8"), Loader=StrictLoader)  # noqa: S506  # a subclass of SafeLoader
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != MANIFEST_SCHEMA:
            raise BundleManifestProblem(f"its schema is {schema}; this version reads schema {MANIFEST_SCHEMA}")
        return msgspec.convert(data, BundleManifest)
    except (yaml.YAMLError, FaError, ValueError, OverflowError, RecursionError) as problem:
        raise BundleManifestProblem(f"{MANIFEST} cannot be read: {' '.join(str(problem).split())}") from None


def compilers_of(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the compilers of all builds."""
    return tuple(sorted({build.compiler for record in records for build in record.builds}))


def builds_of(records: Sequence[Record]) -> dict[str, BuildFacts]:
    """Return the facts of all builds, by variant and architecture."""
    return {f"{build.variant}/{build.arch}": _facts(build) for record in records for build in record.builds}


def outcomes_of(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """Return the number of records by kind and outcome."""
    kinds: dict[str, Counter[str]] = {}
    for record in records:
        kinds.setdefault(record.kind, Counter())[record.outcome.value] += 1
    return {kind: dict(counts) for kind, counts in kinds.items()}


def problem_of_status(status: int, records: Sequence[Record]) -> str:
    """Return why pytest cannot have ended with this status after these records; empty if it can have.

    A status other than 0 is always possible: a test without a record may have failed.
    """
    outcomes = Counter(record.outcome for record in records)
    failed = {outcome: count for outcome, count in outcomes.items() if outcome.is_failure}
    if status in (0, UNDECIDED_STATUS) and failed:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in failed.items())
        return f"pytest's exit status is {status}, but the records have {counts}"
    if status == 0 and outcomes[Outcome.INCONCLUSIVE]:
        undecided = outcomes[Outcome.INCONCLUSIVE]
        return f"pytest's exit status is 0, but the records have {undecided} gates without a verdict"
    return ""


def _facts(build: Build) -> BuildFacts:
    return BuildFacts(build.key, build.code_identity, build.built_on, build.built_at)
