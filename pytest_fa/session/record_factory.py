"""Makes records from results: adds the environment, the time, the source revision, and what the test knows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from pytest_fa.build.unchanged import source_hashes
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.own_tolerance import own_tolerance
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.host.job_output import RECORD_CHARACTERS
from pytest_fa.options.options import Options
from pytest_fa.records.added import Added
from pytest_fa.records.built import Build
from pytest_fa.records.costs import Costs
from pytest_fa.records.environment import read_environment
from pytest_fa.records.machine_identity import read_machine
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import (
    JUDGED_KINDS,
    SCHEMA,
    STAGES,
    Ablation,
    Environment,
    MachineIdentity,
    Record,
    RecordKind,
    Reference,
    Stage,
)
from pytest_fa.records.source import read_source
from pytest_fa.records.text import printable_struct
from pytest_fa.session.rerun import own_rerun_command, rerun_command
from pytest_fa.wire.jobs import CaseResult


class Asker(NamedTuple):
    """What the test knows for which records are made.

    `other_plugins` could have changed this run.  `own_test` is the id of a user's own test; it is empty for a test of
    the shipped suite.  `printed` returns what the test's workers have printed so far.  `is_claim` tells which cases
    were added for what a manifest claims.
    """

    other_plugins: tuple[str, ...] = ()
    own_test: str = ""
    printed: Callable[[], str] = lambda: ""
    is_claim: Callable[[Variant, Case], bool] = lambda *_: False


class RecordFactory:
    """Makes the records of one run: nothing else writes into one.

    `asker` is the test that runs now.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.asker = options, Asker()
        self._sources: dict[str, dict[str, str]] = {}  # of each variant, as they were at its first record

    def forget_sources(self) -> None:
        """Take the sources as they are now: somebody has saved them, and they are judged anew."""
        self._sources.clear()

    @functools.cached_property
    def environment(self) -> Environment:
        """The environment of this machine, read once per run."""
        return read_environment()

    @functools.cached_property
    def machine(self) -> MachineIdentity | None:
        """This machine and its first GPU, without their names."""
        return read_machine(self.options.cache)

    def make(  # noqa: PLR0913  # a record has many parts
        self,
        kind: RecordKind,
        variant: Variant | BrokenVariant,
        case: Case | None,
        result: CaseResult,
        builds: tuple[Build, ...] = (),
        property_name: str | None = None,
        costs: Costs | None = None,
        *,
        tool: str = "",
        rerun: str = "",
        added: Added | None = None,
    ) -> Record:
        """The record of one result.  The role of a variant whose manifest cannot be read is `candidate`.

        If the sources of a variant are not those of its first record, the outcome is `build_changed`, and nothing is
        added.  `tool` is the test's tool, if there are several.  `rerun` is the command that repeats the test of the
        shipped suite, if it is not the usual one of this kind.  `added` is what a feature adds.
        """
        sources = source_hashes(variant, self.options.rootdir) if isinstance(variant, Variant) else {}
        if changed := _changed(self._sources.setdefault(variant.name, sources), sources):
            message = f"{changed} has changed since the first test of {variant.name}; run it again"
            result, added = msgspec.structs.replace(result, outcome=Outcome.BUILD_CHANGED, message=message), None
        stages = {name: Stage(name, "not reached") for name in STAGES}
        stages["build"] = Stage("build", "ok", builds[0].build_seconds if builds else 0.0)
        stages.update({stage.name: stage for stage in result.stages})
        rerun = rerun or rerun_command(self.options, kind, variant.name, case, property_name, tool)
        name = variant.name if case is None else f"{variant.name}-{property_name or case.id}"
        record = Record(
            schema=SCHEMA,
            id=f"{name}-{tool}" if tool else name,
            kind=kind,
            variant=variant.name,
            role=variant.role if isinstance(variant, Variant) else "candidate",
            case=case,
            outcome=result.outcome,
            message=result.message,
            caught_by=result.caught_by,
            stages=tuple(stages.values()),
            builds=builds,
            check=result.check,
            speed=result.speed,
            repeats=result.repeats,
            diagnosis=result.diagnosis,
            fingerprints=result.fingerprints,
            unprotected=result.unprotected,
            compile_seconds=result.compile_seconds,
            workspace_bytes=result.workspace_bytes,
            peak_bytes=result.peak_bytes,
            environment=self.environment,
            machine=self.machine,
            source=read_source(self.options.rootdir),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            rerun_command=self._of_asker(kind, variant.name, rerun),
            costs=costs,
            sources=sources,
            own_tolerance=_own_tolerance(variant, case, self.options.tolerance),
            reference=_reference(kind, variant),
            ablation=_ablation(kind, variant),
            is_claim=kind == "correct" and self._is_claim(variant, case),
            other_plugins=self.asker.other_plugins,
            output="" if result.outcome == Outcome.OK else self.asker.printed()[-RECORD_CHARACTERS:],
            added={added.feature: added} if added else {},
        )
        return printable_struct(record)  # a kernel's words may be in it

    def of_kind(self, kind: RecordKind, record: Record, rerun: str = "") -> Record:
        """The record of a case that had to be right first, as that of the test that needed it."""
        command = self._of_asker(kind, record.variant, rerun or record.rerun_command)
        return msgspec.structs.replace(record, kind=kind, rerun_command=command)

    def _is_claim(self, variant: Variant | BrokenVariant, case: Case | None) -> bool:
        return isinstance(variant, Variant) and case is not None and self.asker.is_claim(variant, case)

    def _of_asker(self, kind: RecordKind, variant: str, command: str) -> str:
        """A rerun command; for a user's own test, one that names this test and not one of the suite."""
        own_test = self.asker.own_test
        return own_rerun_command(self.options, kind, variant, command, own_test) if own_test else command


def _ablation(kind: RecordKind, variant: Variant | BrokenVariant) -> Ablation | None:
    """What an ablation omits, if this is the record of a case."""
    if isinstance(variant, BrokenVariant) or kind not in JUDGED_KINDS or not variant.omits or not variant.parent:
        return None
    return Ablation(variant.omits, variant.parent)


def _reference(kind: RecordKind, variant: Variant | BrokenVariant) -> Reference | None:
    """The user's functions with which the outputs of this record were compared, if they were."""
    if isinstance(variant, BrokenVariant) or variant.own_truth is None or kind == "build":
        return None
    return Reference(variant.own_truth.title, variant.own_truth.sha256, variant.own_truth.max_error)


def _own_tolerance(variant: Variant | BrokenVariant, case: Case | None, policy: str | None) -> str:
    if isinstance(variant, BrokenVariant) or not variant.is_judged:
        return ""
    return own_tolerance(variant, case.dtype if case else "", policy)


def _changed(before: dict[str, str], now: dict[str, str]) -> str:
    """The first file that differs or is gone; empty if none is.  A variant may write new files, as compilers do."""
    return next((path for path in sorted(before) if before[path] != now.get(path)), "")
