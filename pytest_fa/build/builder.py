"""`ensure`: the leaves of a batch of variants, from the cache where they are, compiled where they are not."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from elftools.common.exceptions import ELFError

from pytest_fa.build import cache as cached
from pytest_fa.build import recipe
from pytest_fa.build.command import binding_command, binding_key, toolchain_key
from pytest_fa.build.keys import Dependency, digest
from pytest_fa.build.machine_code import read_machine_code
from pytest_fa.build.ninja import CompileJob, parallel_jobs, run_jobs
from pytest_fa.build.resources import read_ptxas_log, with_machine_code
from pytest_fa.build.toolchain import Toolchain
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import ToolchainError
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu

Say = Callable[[str], None]
Request = tuple[Variant, Target]


class BuildFailure(msgspec.Struct, frozen=True):
    """A build that could not be had: why, and for a failed compilation the command."""

    variant: str
    arch: Target
    reason: str
    command: str = ""

    @property
    def message(self) -> str:
        """All of it, for one architecture."""
        return explain([self])[0]


BuildOutcome = Build | BuildFailure


def explain(failures: list[BuildFailure]) -> list[str]:
    """What went wrong, once for all the architectures that failed alike."""
    alike: dict[str, list[BuildFailure]] = {}
    for failure in failures:
        alike.setdefault(failure.reason, []).append(failure)
    return [
        f"{same[0].variant} for {', '.join(each.arch for each in same)}: {reason}"
        + (f"\ncommand: {same[0].command}" if same[0].command else "")
        for reason, same in alike.items()
    ]


class BuildReport(msgspec.Struct, frozen=True):
    """What a batch gave, by (variant name, arch), and what it cost.

    `lacking` says what this machine has not got, by variant name: nothing was tried then.
    """

    outcomes: dict[tuple[str, str], BuildOutcome]
    compiled: int
    cached: int
    seconds: float
    failed: int = 0
    lacking: dict[str, str] = {}

    @property
    def title(self) -> str:
        """One line for people; empty where nothing was asked for."""
        found = [each for each in self.outcomes.values() if isinstance(each, Build)]
        if not self.outcomes:
            return ""
        places = "; ".join(dict.fromkeys(f"{build.built_on} with {build.compiler}" for build in found)) or "nowhere"
        failed = f"{self.failed} failed, " if self.failed else ""
        count = f"{failed}{self.compiled} compiled, {self.cached} cached"
        return f"builds: {count} in {self.seconds:.3f} s (built on {places})"


def ensure(requests: list[Request], cache: Path, *, no_build: bool = False, say: Say = lambda _: None) -> BuildReport:
    """The build of every request, why there is none, or what this machine lacks; one variant does not touch another."""
    start = time.perf_counter()
    reports: list[BuildReport] = []
    lacking: dict[str, str] = {}
    for toolchain, same, reason in _by_toolchain(requests, cache, no_build=no_build):
        if reason:
            lacking.update({variant.name: reason for variant, _ in same})
        else:
            reports.append(_ensure(same, cache, toolchain, say))
    return BuildReport(
        outcomes={name: outcome for each in reports for name, outcome in each.outcomes.items()},
        compiled=sum(each.compiled for each in reports),
        cached=sum(each.cached for each in reports),
        seconds=time.perf_counter() - start,
        failed=sum(each.failed for each in reports),
        lacking=lacking,
    )


def _by_toolchain(
    requests: list[Request], cache: Path, *, no_build: bool
) -> list[tuple[Toolchain | None, list[Request], str]]:
    """The requests that are compiled alike, with what compiles them, or with what is missing for that."""
    alike: dict[tuple[str, bool], list[Request]] = {}
    for variant, arch in requests:
        alike.setdefault((variant.entry.kind, variant.entry.has_cuda_sources), []).append((variant, arch))
    groups: list[tuple[Toolchain | None, list[Request], str]] = []
    for same in alike.values():
        try:
            groups.append((None if no_build else recipe.toolchain_for(same[0][0], cache), same, ""))
        except ToolchainError as problem:
            groups.append((None, same, str(problem)))
    return groups


def _ensure(requests: list[Request], cache: Path, toolchain: Toolchain | None, say: Say) -> BuildReport:
    """With no toolchain, only what is there already."""
    tool_key = toolchain_key(toolchain) if toolchain else None
    outcomes, missing = _look_up(requests, cache, tool_key)
    found = len(outcomes)
    if toolchain is None:
        outcomes.update({_name(request): _not_there(request, why, cache) for request, why in missing})
    elif missing:
        with cached.locked(cache, say):
            late, missing = _look_up([request for request, _ in missing], cache, tool_key)
            found += len(late)
            outcomes.update(late)
            outcomes.update(_compile([request for request, _ in missing], cache, toolchain, say))
    failed = sum(isinstance(each, BuildFailure) for each in outcomes.values()) if toolchain else 0
    return BuildReport(outcomes, len(missing) - failed if toolchain else 0, found, 0.0, failed)


def _look_up(
    requests: list[Request], cache: Path, tool_key: str | None
) -> tuple[dict[tuple[str, str], BuildOutcome], list[tuple[Request, str]]]:
    outcomes: dict[tuple[str, str], BuildOutcome] = {}
    missing = []
    for request in requests:
        build, why = cached.find_build(cache, *request, tool_key)
        if build is None:
            missing.append((request, why))
        else:
            outcomes[_name(request)] = build
    return outcomes, missing


def _compile(
    requests: list[Request], cache: Path, toolchain: Toolchain, say: Say
) -> dict[tuple[str, str], BuildOutcome]:
    """Compile `requests` in a private staging folder and publish what succeeded.  The cache is locked."""
    if not requests:
        return {}
    stage = cache / f".stage-{uuid.uuid4().hex}"
    try:
        started_ns = time.time_ns()
        start = time.perf_counter()
        jobs = [*_binding_jobs(requests, stage, cache, toolchain), *_stage_variants(requests, stage, cache, toolchain)]
        titles = ", ".join(f"{variant.name}/{arch}" for variant, arch in requests)
        say(f"building {len(requests)} with {toolchain.title}: {titles}")
        seconds = run_jobs(
            stage,
            jobs,
            lambda done, total, title: say(f"{done}/{total} {title} ({time.perf_counter() - start:.1f} s)"),
            recipe.jobs_at_once(requests[0][0]),
        )
        binding_problem = _publish_binding(stage, cache, toolchain) if (stage / "binding").is_dir() else None
        with ThreadPoolExecutor(parallel_jobs()) as pool:
            outcomes = pool.map(
                lambda each: _harvest(
                    each[1],
                    stage / str(each[0]),
                    cache,
                    toolchain,
                    started_ns,
                    seconds.get(str(each[0]), 0.0),
                    binding_problem,
                ),
                enumerate(requests),
            )
            return {_name(request): outcome for request, outcome in zip(requests, outcomes, strict=True)}
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _binding_folder(cache: Path, toolchain: Toolchain) -> Path:
    return cache / "binding" / binding_key(toolchain)


def _binding_jobs(requests: list[Request], stage: Path, cache: Path, toolchain: Toolchain) -> list[CompileJob]:
    """One job where the shared binding is needed and this compiler has not made it yet."""
    stage.mkdir(parents=True)
    if not any(recipe.needs_binding(variant) for variant, _ in requests):
        return []
    (stage / "binding").mkdir()
    if (_binding_folder(cache, toolchain) / "binding.o").is_file():
        return []
    return [CompileJob("binding", "binding.o", tuple(binding_command(toolchain)), "binding")]


def _publish_binding(stage: Path, cache: Path, toolchain: Toolchain) -> str | None:
    """Keep a fresh binding; the compiler's lines where it failed."""
    target = _binding_folder(cache, toolchain)
    if (target / "binding.o").is_file():
        return None
    if not (stage / "binding" / "binding.o").is_file():
        return f"the shared binding did not compile:\n{_log(stage / 'binding')}"
    target.parent.mkdir(parents=True, exist_ok=True)
    (stage / "binding").rename(target)
    return None


def _stage_variants(requests: list[Request], stage: Path, cache: Path, toolchain: Toolchain) -> list[CompileJob]:
    jobs = []
    binding = _binding_folder(cache, toolchain)
    is_fresh = not (binding / "binding.o").is_file()
    for index, (variant, arch) in enumerate(requests):
        folder = stage / str(index)
        folder.mkdir()
        there = Path("..") / "binding" if is_fresh else binding
        command = tuple(recipe.stage(variant, arch, folder, toolchain, there))
        after = "binding/binding.o" if is_fresh and recipe.needs_binding(variant) else None
        jobs.append(CompileJob(str(index), "kernel.so", command, f"{variant.name}/{arch}", after))
    return jobs


def _harvest(
    request: Request,
    staged: Path,
    cache: Path,
    toolchain: Toolchain,
    started_ns: int,
    seconds: float,
    binding_problem: str | None,
) -> BuildOutcome:
    """One staged job to a published build, or to its failure."""
    variant, arch = request
    if not (staged / "kernel.so").is_file():
        if binding_problem and recipe.needs_binding(variant):
            return BuildFailure(variant.name, arch, binding_problem, shlex.join(binding_command(toolchain)))
        command = shlex.join(recipe.failed_command(variant, arch, toolchain))
        return BuildFailure(variant.name, arch, _compile_error(_log(staged)), command)
    deps = recipe.dependencies(variant, staged)
    if edited := _edited_since(deps, variant, staged, started_ns):
        return BuildFailure(variant.name, arch, f"{edited} changed while it was being compiled; run again")
    tool_key = toolchain_key(toolchain)
    library = cached.content_path(cache, variant, arch, tool_key, deps)
    build = _describe_build(request, staged, toolchain, library=library, deps=deps, seconds=seconds)
    recipe.tidy(variant, staged)
    return cached.publish(cache, variant, arch, tool_key, staged, cached.StoredBuild(build, deps))


def _describe_build(
    request: Request,
    staged: Path,
    toolchain: Toolchain,
    *,
    library: str,
    deps: tuple[Dependency, ...],
    seconds: float,
) -> Build:
    variant, arch = request
    kernels, advisories = read_ptxas_log(_log(staged))
    identity = missing = None
    try:
        code = read_machine_code(staged / "kernel.so")
        identity, kernels = code.identity, with_machine_code(kernels, code)
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError, ELFError) as problem:
        missing = f"machine code not read: {problem}"
    gpu = find_gpu()
    state = (staged / "kernel.so").stat()
    return Build(
        variant=variant.name,
        arch=arch,
        key=digest([recipe.request_key(variant, arch), toolchain_key(toolchain), deps]),
        library=library,
        code_identity=identity,
        code_identity_missing=missing,
        kernels=kernels,
        advisories=advisories,
        command=recipe.shown_command(variant, arch),
        compiler=toolchain.title,
        built_on=f"{platform.system()} {platform.machine()}, {gpu.name if gpu else 'no GPU'}",
        built_at=datetime.fromtimestamp(state.st_mtime, UTC).isoformat(timespec="seconds"),
        build_seconds=seconds,
    )


def _edited_since(deps: tuple[Dependency, ...], variant: Variant, folder: Path, started_ns: int) -> str:
    """Files whose content or metadata changed after the build began: their hash might bless other code."""
    late = [path for path, _ in deps if os.stat(cached.located(path, variant, folder)).st_ctime_ns >= started_ns]  # noqa: PTH116
    return ", ".join(late[:3])


def _not_there(request: Request, why: str, cache: Path) -> BuildFailure:
    variant, arch = request
    reason = f"no build in {cache}: {why}; drop --fa-no-build, or build it there first"
    return BuildFailure(variant.name, arch, reason)


def _compile_error(log: str) -> str:
    """The compiler's own error lines, ptxas's figures and an inner ninja's commands left out."""
    chatter = r"ptxas info|\s+\d+ bytes stack frame|ptxas \.|FAILED: |ninja: build stopped|.* -MM?D "
    named_alike = re.sub(r"\S*tmpxft_\S+", "(a temporary file)", log)
    lines = [line for line in named_alike.splitlines() if not re.match(chatter, line)]
    return "\n".join(["it did not compile:", *lines[-60:]])


def _log(folder: Path) -> str:
    path = folder / "log.txt"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(no output)"


def _name(request: Request) -> tuple[str, str]:
    return (request[0].name, request[1])
