"""Makes records from results: adds the environment, the time, the source revision and the rerun command."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

import msgspec

from pytest_fa.build.unchanged import source_hashes
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.own_tolerance import own_tolerance
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.options.options import Options
from pytest_fa.records.built import Build
from pytest_fa.records.costs import Costs
from pytest_fa.records.environment import read_environment
from pytest_fa.records.machine_identity import read_machine
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import SCHEMA, STAGES, Environment, MachineIdentity, Record, RecordKind, Stage
from pytest_fa.records.source import read_source
from pytest_fa.session.rerun import rerun_command
from pytest_fa.wire.jobs import CaseResult


class RecordFactory:
    """Makes the records of one run."""

    def __init__(self, options: Options) -> None:
        self.options = options
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

    def make(
        self,
        kind: RecordKind,
        variant: Variant | BrokenVariant,
        case: Case | None,
        result: CaseResult,
        builds: tuple[Build, ...] = (),
        property_name: str | None = None,
        costs: Costs | None = None,
    ) -> Record:
        """The record of one result.  The role of a variant whose manifest cannot be read is `candidate`.

        If the sources of a variant are not those of its first record, the outcome is `build_changed`.
        """
        sources = source_hashes(variant, self.options.rootdir) if isinstance(variant, Variant) else {}
        if changed := _changed(self._sources.setdefault(variant.name, sources), sources):
            message = f"{changed} has changed since the first test of {variant.name}; run it again"
            result = msgspec.structs.replace(result, outcome=Outcome.BUILD_CHANGED, message=message)
        stages = {name: Stage(name, "not reached") for name in STAGES}
        stages["build"] = Stage("build", "ok", builds[0].build_seconds if builds else 0.0)
        stages.update({stage.name: stage for stage in result.stages})
        return Record(
            schema=SCHEMA,
            id=variant.name if case is None else f"{variant.name}-{property_name or case.id}",
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
            environment=self.environment,
            machine=self.machine,
            source=read_source(self.options.rootdir),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            rerun_command=rerun_command(self.options, kind, variant.name, case, property_name),
            costs=costs,
            sources=sources,
            own_tolerance=_own_tolerance(variant, case, self.options.tolerance),
        )


def _own_tolerance(variant: Variant | BrokenVariant, case: Case | None, policy: str | None) -> str:
    if isinstance(variant, BrokenVariant) or not variant.is_judged:
        return ""
    return own_tolerance(variant, case.dtype if case else "", policy)


def _changed(before: dict[str, str], now: dict[str, str]) -> str:
    """The first file that differs or is gone; empty if none is.  A variant may write new files, as compilers do."""
    return next((path for path in sorted(before) if before[path] != now.get(path)), "")
