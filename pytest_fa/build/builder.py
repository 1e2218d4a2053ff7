"""`ensure` returns the builds of a batch of variants: those in the cache, and the others compiled now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from pytest_fa.build import cache as cached
from pytest_fa.build import recipe
from pytest_fa.build.command import toolchain_key
from pytest_fa.build.flag_list import refusal
from pytest_fa.build.outcomes import BuildFailure, BuildOutcome, BuildReport
from pytest_fa.build.toolchain import Toolchain
from pytest_fa.build.units import Outcomes, Request, Say, Unit, units_of
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import Interrupted, ToolchainError
from pytest_fa.locks import say_waits
from pytest_fa.records.built import Build


class Wanted(NamedTuple):
    """A request, with the toolchain that compiles it and its key; both are None if nothing may be compiled."""

    variant: Variant
    arch: Target
    toolchain: Toolchain | None
    tool_key: str | None

    @property
    def request(self) -> Request:
        """The variant and the architecture."""
        return self.variant, self.arch


def ensure(
    requests: list[Request],
    cache: Path,
    *,
    no_build: bool = False,
    allowed_flags: tuple[str, ...] = (),
    say: Say = say_waits,
) -> BuildReport:
    """Return the build of each request, the reason why there is none, or the tool that this machine lacks.

    With `no_build`, nothing is compiled.  A failure does not affect other requests.  `allowed_flags` are the globs of
    `--fa-allow-flag`.  `say` is called with progress messages; by default, stderr shows what is waited for.  Raises
    `UsageProblem` for a cache that every user may write to.
    """
    start = time.perf_counter()
    cached.require_safe(cache)
    endless = {
        folder: _endless_file(folder) for folder in {folder for variant, _ in requests for folder in _read(variant)}
    }
    reasons = ((request, refusal(request[0], allowed_flags) or _first(endless, request[0])) for request in requests)
    refused = {_name(request): reason for request, reason in reasons if reason}
    reports = [_failed(refused)]
    lacking: dict[str, str] = {}
    wanted: list[Wanted] = []
    buildable = [request for request in requests if _name(request) not in refused]
    for toolchain, group, reason in _by_toolchain(buildable, cache, no_build=no_build):
        if reason:
            lacking.update({variant.name: reason for variant, _ in group})
            continue
        unknown = {_name(request): why for request in group if toolchain and (why := toolchain.lacks(request[1:]))}
        reports.append(_failed({name: f"arch: {why}" for name, why in unknown.items()}))
        tool_key = toolchain_key(toolchain) if toolchain else None
        wanted += [Wanted(*request, toolchain, tool_key) for request in group if _name(request) not in unknown]
    reports.append(_ensure(wanted, cache, say, no_build=no_build))
    return BuildReport(
        outcomes={name: outcome for report in reports for name, outcome in report.outcomes.items()},
        compiled=sum(report.compiled for report in reports),
        cached=sum(report.cached for report in reports),
        seconds=time.perf_counter() - start,
        failed=sum(report.failed for report in reports),
        lacking=lacking,
        shared=sum(report.shared for report in reports),
    )


def _failed(reasons: dict[tuple[str, str], str]) -> BuildReport:
    """Return the report of requests that are not compiled, with the reason for each."""
    return BuildReport({name: BuildFailure(*name, why) for name, why in reasons.items()}, 0, 0, 0.0, len(reasons))


def _read(variant: Variant) -> tuple[str, ...]:
    """Return the folders of sources and headers that the manifest names."""
    return (variant.folder, *(str(Path(variant.folder) / include) for include in variant.entry.include))


def _first(endless: dict[str, str | None], variant: Variant) -> str | None:
    return next((problem for folder in _read(variant) if (problem := endless[folder])), None)


def _endless_file(folder: str) -> str | None:
    """Return which file of a folder a compiler would read without end, or None."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_fifo() or path.is_char_device():
            return f"{path} is not a regular file; a compiler that includes it would not end; remove it"
    return None


def _by_toolchain(
    requests: list[Request], cache: Path, *, no_build: bool
) -> list[tuple[Toolchain | None, list[Request], str]]:
    """Group the requests by toolchain; each group has its toolchain, or the reason why that cannot be found."""
    by_kind: dict[tuple[str, bool], list[Request]] = {}
    for variant, arch in requests:
        by_kind.setdefault((variant.entry.kind, variant.entry.has_cuda_sources), []).append((variant, arch))
    groups: list[tuple[Toolchain | None, list[Request], str]] = []
    for group in by_kind.values():
        try:
            groups.append((None if no_build else recipe.toolchain_for(group[0][0], cache), group, ""))
        except ToolchainError as problem:
            groups.append((None, group, str(problem)))
    return groups


def _ensure(wanted: list[Wanted], cache: Path, say: Say, *, no_build: bool) -> BuildReport:
    """Return the builds in the cache, and, unless `no_build`, compile the others in one batch."""
    outcomes, missing = _look_up(wanted, cache)
    cached_count = len(outcomes)
    if no_build:
        outcomes.update({_name(each.request): _not_in_cache(each.request, why.reason, cache) for each, why in missing})
        return BuildReport(outcomes, 0, cached_count, 0.0)
    units: list[Unit] = []
    left = [each for each, _ in missing]
    locks = cached.BuildLocks(cache)
    try:
        while left:
            # what other processes compile comes last
            held = locks.take([build.request for build in left], say)
            # another process may have published builds before this one took their locks
            published, missing = _look_up([build for build in left if _name(build.request) in held], cache)
            left = [build for build in left if _name(build.request) not in held]
            cached_count += len(published)
            outcomes.update(published)
            for name in published:
                locks.release(*name)
            units += (batch := _batch(missing, say))
            outcomes.update(_compile(batch, cache, say, locks))
            locks.release_all()
    except KeyboardInterrupt:
        count = len(_look_up(wanted, cache)[0])
        raise Interrupted(f"{count} of {len(wanted)} builds are kept; the same command goes on") from None
    finally:
        locks.release_all()
    failed = sum(isinstance(outcome, BuildFailure) for outcome in outcomes.values())
    compiled = [len(names) for unit in units if (names := _built(unit, outcomes))]
    return BuildReport(outcomes, len(compiled), cached_count, 0.0, failed, shared=sum(compiled) - len(compiled))


def _batch(missing: list[tuple[Wanted, cached.Lookup]], say: Say) -> list[Unit]:
    """Return the compilations of a batch, and say which builds are compiled again because they are damaged."""
    for each, lookup in missing:
        if lookup.damage:
            say(f"compiling {each.variant.name}/{each.arch} again: {lookup.damage}")
    return units_of([(each.request, each.toolchain) for each, _ in missing if each.toolchain])


def _compile(units: list[Unit], cache: Path, say: Say, locks: cached.BuildLocks) -> Outcomes:
    """Compile a batch.  The lock of a build is released as soon as it is published."""
    if not units:
        return {}
    from pytest_fa.build.compile_batch import compile_units  # noqa: PLC0415  # 40 ms, only to compile

    def release(unit: Unit) -> None:
        for variant in unit.variants:
            locks.release(variant.name, unit.arch)

    return compile_units(units, cache, say, release)


def _built(unit: Unit, outcomes: dict[tuple[str, str], BuildOutcome]) -> list[str]:
    """Return the variants of a unit that have a build now."""
    names = (variant.name for variant in unit.variants)
    return [name for name in names if isinstance(outcomes[(name, unit.arch)], Build)]


def _look_up(
    wanted: list[Wanted], cache: Path
) -> tuple[dict[tuple[str, str], BuildOutcome], list[tuple[Wanted, cached.Lookup]]]:
    outcomes: dict[tuple[str, str], BuildOutcome] = {}
    missing = []
    for each in wanted:
        lookup = cached.find_build(cache, *each.request, each.tool_key)
        if lookup.build is None:
            missing.append((each, lookup))
        else:
            outcomes[_name(each.request)] = lookup.build
    return outcomes, missing


def _not_in_cache(request: Request, reason: str, cache: Path) -> BuildFailure:
    variant, arch = request
    message = f"no build in {cache}: {reason}; drop --fa-no-build, or build it there first"
    return BuildFailure(variant.name, arch, message)


def _name(request: Request) -> tuple[str, str]:
    return (request[0].name, request[1])
