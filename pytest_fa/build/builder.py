"""`ensure` returns the builds of a batch of variants: those in the cache, and the others compiled now."""

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

from elftools.common.exceptions import ELFError

from pytest_fa.build import cache as cached
from pytest_fa.build import recipe
from pytest_fa.build.command import binding_command, binding_key, toolchain_key
from pytest_fa.build.flag_list import refusal, unlisted_flags
from pytest_fa.build.keys import Dependency, digest, file_hash
from pytest_fa.build.machine_code import read_machine_code
from pytest_fa.build.ninja import CompileJob, parallel_jobs, run_jobs
from pytest_fa.build.outcomes import BuildFailure, BuildOutcome, BuildReport
from pytest_fa.build.resources import read_ptxas_log, with_machine_code
from pytest_fa.build.toolchain import Toolchain
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import ToolchainError
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.text import printable

LEAST_FREE_BYTES = 2**20  # less than this is a full disk
MOST_LOG_BYTES = 2**24  # ptxas figures of one build take a few kilobytes

Say = Callable[[str], None]
Request = tuple[Variant, Target]


def ensure(
    requests: list[Request],
    cache: Path,
    *,
    no_build: bool = False,
    allowed_flags: tuple[str, ...] = (),
    say: Say = lambda _: None,
) -> BuildReport:
    """Return the build of each request, the reason why there is none, or the tool that this machine lacks.

    With `no_build`, nothing is compiled.  A failure does not affect other requests.  `allowed_flags` are the globs of
    `--fa-allow-flag`.  `say` is called with progress messages.  Raises `UsageProblem` for a cache that every user may
    write to.
    """
    start = time.perf_counter()
    cached.require_safe(cache)
    endless = {folder: _endless_file(folder) for folder in {variant.folder for variant, _ in requests}}
    reasons = ((request, refusal(request[0], allowed_flags) or endless[request[0].folder]) for request in requests)
    refused = {_name(request): reason for request, reason in reasons if reason}
    failures = {name: BuildFailure(*name, reason) for name, reason in refused.items()}  # type: ignore[arg-type]
    reports: list[BuildReport] = [BuildReport({**failures}, 0, 0, 0.0, len(failures))]
    lacking: dict[str, str] = {}
    buildable = [request for request in requests if _name(request) not in refused]
    for toolchain, group, reason in _by_toolchain(buildable, cache, no_build=no_build):
        if reason:
            lacking.update({variant.name: reason for variant, _ in group})
        else:
            reports.append(_ensure(group, cache, toolchain, say))
    return BuildReport(
        outcomes={name: outcome for report in reports for name, outcome in report.outcomes.items()},
        compiled=sum(report.compiled for report in reports),
        cached=sum(report.cached for report in reports),
        seconds=time.perf_counter() - start,
        failed=sum(report.failed for report in reports),
        lacking=lacking,
    )


def _endless_file(folder: str) -> str | None:
    """Return which file of a variant's folder a compiler would read without end, or None."""
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


def _ensure(requests: list[Request], cache: Path, toolchain: Toolchain | None, say: Say) -> BuildReport:
    """Return the builds of one group; with `toolchain` = None, only those that are in the cache."""
    tool_key = toolchain_key(toolchain) if toolchain else None
    outcomes, missing = _look_up(requests, cache, tool_key)
    cached_count = len(outcomes)
    if toolchain is None:
        outcomes.update({_name(request): _not_in_cache(request, lookup.reason, cache) for request, lookup in missing})
    elif missing:
        with cached.locked(cache, say):
            # another process may have published builds while this one waited for the lock
            published, missing = _look_up([request for request, _ in missing], cache, tool_key)
            cached_count += len(published)
            outcomes.update(published)
            for (variant, arch), lookup in missing:
                if lookup.damage:
                    say(f"compiling {variant.name}/{arch} again: {lookup.damage}")
            outcomes.update(_compile([request for request, _ in missing], cache, toolchain, say))
    failed = sum(isinstance(outcome, BuildFailure) for outcome in outcomes.values()) if toolchain else 0
    return BuildReport(outcomes, len(missing) - failed if toolchain else 0, cached_count, 0.0, failed)


def _look_up(
    requests: list[Request], cache: Path, tool_key: str | None
) -> tuple[dict[tuple[str, str], BuildOutcome], list[tuple[Request, cached.Lookup]]]:
    outcomes: dict[tuple[str, str], BuildOutcome] = {}
    missing = []
    for request in requests:
        lookup = cached.find_build(cache, *request, tool_key)
        if lookup.build is None:
            missing.append((request, lookup))
        else:
            outcomes[_name(request)] = lookup.build
    return outcomes, missing


def _compile(
    requests: list[Request], cache: Path, toolchain: Toolchain, say: Say
) -> dict[tuple[str, str], BuildOutcome]:
    """Compile `requests` in a private staging folder and publish those that succeed.  The cache must be locked."""
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
                lambda numbered: _finish_build(
                    numbered[1],
                    stage / str(numbered[0]),
                    cache,
                    toolchain,
                    started_ns,
                    seconds.get(str(numbered[0]), 0.0),
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
    """Return a job for the shared binding if a variant needs it and this toolchain has not compiled it yet."""
    stage.mkdir(parents=True)
    if not any(recipe.needs_binding(variant) for variant, _ in requests):
        return []
    (stage / "binding").mkdir()
    if cached.has_binding(cache, _binding_folder(cache, toolchain)):
        return []
    return [CompileJob("binding", "binding.o", tuple(binding_command(toolchain)), "binding")]


def _publish_binding(stage: Path, cache: Path, toolchain: Toolchain) -> str | None:
    """Move a newly compiled binding to the cache; return the compiler's output if it failed."""
    target = _binding_folder(cache, toolchain)
    if cached.has_binding(cache, target):
        return None
    if not (stage / "binding" / "binding.o").is_file():
        return f"the shared binding did not compile:\n{_log(stage / 'binding')}"
    cached.publish_binding(stage / "binding", cache, target)
    return None


def _stage_variants(requests: list[Request], stage: Path, cache: Path, toolchain: Toolchain) -> list[CompileJob]:
    jobs = []
    binding = _binding_folder(cache, toolchain)
    is_new = not cached.has_binding(cache, binding)
    for index, (variant, arch) in enumerate(requests):
        folder = stage / str(index)
        folder.mkdir()
        binding_folder = Path("..") / "binding" if is_new else binding
        command = tuple(recipe.stage(variant, arch, folder, toolchain, binding_folder))
        after = "binding/binding.o" if is_new and recipe.needs_binding(variant) else None
        jobs.append(CompileJob(str(index), "kernel.so", command, f"{variant.name}/{arch}", after))
    return jobs


def _finish_build(
    request: Request,
    staged: Path,
    cache: Path,
    toolchain: Toolchain,
    started_ns: int,
    seconds: float,
    binding_problem: str | None,
) -> BuildOutcome:
    """Publish the build of a finished job, or return its failure."""
    variant, arch = request
    if not (staged / "kernel.so").is_file():
        if binding_problem and recipe.needs_binding(variant):
            return BuildFailure(variant.name, arch, binding_problem, shlex.join(binding_command(toolchain)))
        command = shlex.join(recipe.failed_command(variant, arch, toolchain))
        return BuildFailure(variant.name, arch, _compile_error(_log(staged)), command)
    deps = recipe.dependencies(variant, staged)
    if edited := _edited_since(deps, variant, staged, started_ns):
        return BuildFailure(variant.name, arch, f"{edited} changed during the compilation; run again")
    tool_key = toolchain_key(toolchain)
    library = cached.library_path(cache, variant, arch, tool_key, deps)
    build = _describe_build(request, staged, toolchain, library=library, deps=deps, seconds=seconds)
    recipe.remove_scratch_files(variant, staged)
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
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, ELFError) as problem:
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
        environment=recipe.compiler_environment(variant),
        unlisted_flags=unlisted_flags(variant),
        files={name: file_hash(str(staged / name)) or "" for name in recipe.published_files(variant)},
    )


def _edited_since(deps: tuple[Dependency, ...], variant: Variant, folder: Path, started_ns: int) -> str:
    """Return files that changed after the build began: their hash may not be that of the code that was compiled."""
    paths = {path: cached.dependency_path(path, variant, folder) for path, _ in deps}
    edited = [path for path, real_path in paths.items() if os.stat(real_path).st_ctime_ns >= started_ns]  # noqa: PTH116
    return ", ".join(edited[:3])


def _not_in_cache(request: Request, reason: str, cache: Path) -> BuildFailure:
    variant, arch = request
    message = f"no build in {cache}: {reason}; drop --fa-no-build, or build it there first"
    return BuildFailure(variant.name, arch, message)


def _compile_error(log: str) -> str:
    """Return the first error, then the compiler's lines, without ptxas's figures and the commands of an inner ninja."""
    chatter = r"ptxas info|\s+\d+ bytes stack frame|ptxas \.|FAILED: |ninja: build stopped|.* -MM?D "
    without_temporary_names = re.sub(r"\S*tmpxft_\S+", "(a temporary file)", log)
    lines = [line for line in without_temporary_names.splitlines() if not re.match(chatter, line)]
    first_error = next((line for line in lines if re.search(r"\b(error|fatal)\b", line)), "it does not compile")
    return "\n".join([first_error.strip(), *lines[-60:]])


def _log(folder: Path) -> str:
    """Return the last part of a compiler's output; on a full disk, where it is incomplete, that there is no space."""
    path = folder / "log.txt"
    full = shutil.disk_usage(folder).free < LEAST_FREE_BYTES
    note = f"No space left on device: {folder.parents[1]}\n" if full else ""
    if not path.is_file():
        return f"{note}(no output)"
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - MOST_LOG_BYTES))
        return note + printable(stream.read().decode(errors="replace"))


def _name(request: Request) -> tuple[str, str]:
    return (request[0].name, request[1])
