"""Compile the builds that the cache lacks, in one batch.

Variants whose libraries would be equal are compiled once: they have the same sources, flags and definitions, and differ
only in what is called, such as the `target` of an extension.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from elftools.common.exceptions import ELFError

from pytest_fa.build import cache as cached
from pytest_fa.build import recipe
from pytest_fa.build.command import (
    LIBRARY,
    LOG,
    OBJECT,
    binding_command,
    binding_job,
    binding_key,
    object_name,
    toolchain_key,
)
from pytest_fa.build.compile_errors import compile_error, lacks_entry
from pytest_fa.build.early_disassembly import EarlyDisassembly, disassembling_early
from pytest_fa.build.exports import entry_problem, workspace_problem
from pytest_fa.build.flag_list import unlisted_flags
from pytest_fa.build.interface import Interface, interface_of
from pytest_fa.build.keys import digest, file_hash
from pytest_fa.build.lookups import CompiledFrom
from pytest_fa.build.machine_code import read_machine_code
from pytest_fa.build.ninja import CompileJob, about, parallel_jobs, run_jobs, seconds_of
from pytest_fa.build.outcomes import BuildFailure, BuildOutcome
from pytest_fa.build.resources import read_ptxas_log, with_machine_code
from pytest_fa.build.toolchain import Toolchain
from pytest_fa.build.units import Outcomes, Say, Unit
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.text import printable

PUBLISHED = "published"  # beside a staged binding that the cache has
MIN_FREE_BYTES = 2**20  # less than this is a full disk
MAX_LOG_BYTES = 2**24  # ptxas figures of one build take a few kilobytes


class Binding(NamedTuple):
    """A shared binding: the compiler, and the interface that it binds."""

    toolchain: Toolchain
    interface: Interface


def compile_units(units: list[Unit], cache: Path, say: Say, is_done: Callable[[Unit], None]) -> Outcomes:
    """Compile in a private staging folder, and publish each build as soon as it is compiled.

    The locks of the builds must be held.  `is_done` is called when the builds of a unit are published, or have failed.
    """
    with cached.staging_folder(cache) as stage:
        return _Batch(units, stage, cache, say, is_done).run()


class _Batch:
    """The compilations of one run of ninja."""

    def __init__(self, units: list[Unit], stage: Path, cache: Path, say: Say, is_done: Callable[[Unit], None]) -> None:
        self._units, self._stage, self._cache, self._say, self._is_done = units, stage, cache, say, is_done
        self._started_ns, self._start = time.time_ns(), time.perf_counter()
        self._bindings = {_binding_of(unit) for unit in units if recipe.needs_binding(unit.first)}
        self._indices = {unit.title: index for index, unit in enumerate(units)}
        self._outcomes = dict[int, Future[Outcomes]]()

    def run(self) -> Outcomes:
        """Compile everything; return the builds and failures."""
        stage, cache, units = self._stage, self._cache, self._units
        plan = recipe.parallel_plan([unit.first for unit in units])
        jobs = [*_binding_jobs(self._bindings, stage, cache), *_stage_units(units, stage, cache, plan)]
        for title in dict.fromkeys(unit.toolchain.title for unit in units):
            names = [unit.title for unit in units if unit.toolchain.title == title]
            self._say(f"building {len(names)} with {title}{about(len(jobs), plan.builds_at_once)}: {', '.join(names)}")
        own = [stage / str(index) for index, unit in enumerate(units) if recipe.needs_binding(unit.first)]
        with disassembling_early(own) as early, ThreadPoolExecutor(parallel_jobs()) as pool:

            def finish(index: int, problem: str | None = None) -> None:
                self._outcomes[index] = pool.submit(self._finish, index, early, problem)

            def ended(done: int, total: int, title: str) -> None:
                self._say(f"{done}/{total} {title} ({time.perf_counter() - self._start:.1f} s)")
                self._publish_bindings()
                index = self._indices.get(title)
                if index is not None and (stage / str(index) / LIBRARY).is_file():
                    finish(index)  # a failed one may be compiled again, which waits until the others have ended

            try:
                run_jobs(stage, jobs, ended, plan.builds_at_once)
                early.stop_looking()
                problems = {binding: self._binding_problem(binding) for binding in self._bindings}
                for index, unit in enumerate(units):
                    if index not in self._outcomes:
                        finish(index, problems.get(_binding_of(unit)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        outcomes = [self._outcomes[index].result() for index in range(len(units))]
        return {name: outcome for each in outcomes for name, outcome in each.items()}

    def _finish(self, index: int, early: EarlyDisassembly, binding_problem: str | None) -> Outcomes:
        folder, unit = self._stage / str(index), self._units[index]
        try:
            seconds = seconds_of(self._stage, str(index)) if (folder / LIBRARY).is_file() else 0.0
            return _finish(_Finished(unit, folder, self._started_ns, seconds, early), self._cache, binding_problem)
        finally:
            self._is_done(unit)

    def _publish_bindings(self) -> None:
        """Publish copies of the bindings that are compiled: builds of this batch are linked with the staged ones."""
        for binding in self._bindings:
            staged, target = self._stage / _binding_stage(binding), _binding_folder(self._cache, binding)
            if (staged / "binding.o").is_file() and not (staged / PUBLISHED).exists():
                copy = shutil.copytree(staged, staged.with_name(f"{staged.name}-copy"))
                cached.publish_binding(copy, self._cache, target)
                (staged / PUBLISHED).touch()

    def _binding_problem(self, binding: Binding) -> str | None:
        """The compiler's output if the binding did not compile."""
        staged = self._stage / _binding_stage(binding)
        if cached.has_binding(self._cache, _binding_folder(self._cache, binding)):
            return None
        return f"the shared binding did not compile:\n{_log(staged)}"


# -- staging ----------------------------------------------------------------------------------------------------------


def _binding_of(unit: Unit) -> Binding:
    return Binding(unit.toolchain, interface_of(unit.first))


def _binding_folder(cache: Path, binding: Binding) -> Path:
    return cache / "binding" / binding_key(*binding)


def _binding_jobs(bindings: set[Binding], stage: Path, cache: Path) -> list[CompileJob]:
    """Return a job for each shared binding that a unit needs and that is not in the cache."""
    jobs = []
    for binding in bindings:
        folder = _binding_stage(binding)
        if not cached.has_binding(cache, _binding_folder(cache, binding)):
            (stage / folder).mkdir()
            jobs.append(CompileJob(folder, "binding.o", tuple(binding_job(*binding)), "binding"))
    return jobs


def _binding_stage(binding: Binding) -> str:
    """The name of the staging folder of a binding."""
    return f"{Path(binding.interface.binding).stem}-{toolchain_key(binding.toolchain)}"


def _stage_units(units: list[Unit], stage: Path, cache: Path, plan: recipe.ParallelPlan) -> list[CompileJob]:
    jobs = []
    for index, unit in enumerate(units):
        folder = stage / str(index)
        folder.mkdir()
        binding = _binding_of(unit)
        linked, after = _binding_folder(cache, binding), None
        if recipe.needs_binding(unit.first) and not cached.has_binding(cache, linked):
            linked, after = Path("..") / _binding_stage(binding), f"{_binding_stage(binding)}/binding.o"
        command = recipe.stage(unit.first, unit.arch, folder, unit.toolchain, linked, plan)
        jobs.append(CompileJob(str(index), LIBRARY, tuple(command), unit.title, after))
    return jobs


# -- what was compiled ------------------------------------------------------------------------------------------------


class _Finished(NamedTuple):
    """A unit whose job has ended, its staging folder, when the batch began, and how long its job took.

    `early` has the device code that was disassembled before the job ended.
    """

    unit: Unit
    folder: Path
    started_ns: int
    seconds: float
    early: EarlyDisassembly


def _finish(finished: _Finished, cache: Path, binding_problem: str | None) -> Outcomes:
    """Publish the library for each variant of a unit, or return the failure of each."""
    unit, staged = finished.unit, finished.folder
    variant, arch, toolchain = unit.first, unit.arch, unit.toolchain
    source = variant.entry.source
    if not (staged / LIBRARY).is_file():
        if binding_problem and recipe.needs_binding(variant):
            return unit.failure(binding_problem, shlex.join(binding_command(*_binding_of(unit))))
        return unit.failure(_compile_error(unit, staged), shlex.join(recipe.failed_command(variant, arch, toolchain)))
    compiled = staged / object_name(source)
    if not compiled.is_file():  # the compiler is a wrapper, or was told to keep its files elsewhere
        compiled = staged / LIBRARY
    if recipe.needs_binding(variant) and (problem := workspace_problem(source, compiled, interface_of(variant))):
        return unit.failure(problem)
    inputs = recipe.inputs(variant, arch, toolchain, staged)
    if edited := _edited_since(inputs, variant, staged, finished.started_ns):
        return unit.failure(f"{edited} changed during the compilation; run again")
    build = _describe_build(finished, inputs)
    recipe.remove_scratch_files(variant, staged)
    return {(each.name, arch): _publish(each, build, inputs, finished, cache) for each in unit.variants}


def _publish(variant: Variant, build: Build, inputs: CompiledFrom, finished: _Finished, cache: Path) -> BuildOutcome:
    """Publish the unit's library as the build of one of its variants.

    Each variant has a copy of its own, and no link: the loader recognises a file by its inode, and two variants in one
    process must not share the library's variables.
    """
    arch, tool_key = finished.unit.arch, toolchain_key(finished.unit.toolchain)
    library = cached.library_path(cache, variant, arch, tool_key, inputs)
    flags = unlisted_flags(variant)
    own = msgspec.structs.replace(build, variant=variant.name, library=library, unlisted_flags=flags)
    staged = finished.folder
    try:
        if variant is not finished.unit.variants[-1]:
            staged = shutil.copytree(staged, staged.with_name(f"{staged.name}-{variant.name}"))
        stored = cached.StoredBuild(own, inputs.dependencies, inputs.lookups)
        return cached.publish(cache, variant, arch, tool_key, staged, stored)
    except OSError as problem:
        return BuildFailure(variant.name, arch, f"it was compiled, but cannot be written to {cache}: {problem}")


def _describe_build(finished: _Finished, inputs: CompiledFrom) -> Build:
    """Describe the build of the unit's first variant; `_publish` adds what is that of one variant."""
    (variants, arch, toolchain), staged = finished.unit, finished.folder
    variant = variants[0]
    kernels, advisories = read_ptxas_log(_log(staged))
    identity = missing = None
    try:
        code = read_machine_code(staged / LIBRARY, finished.early.of(staged))
        identity, kernels = code.identity, with_machine_code(kernels, code)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, ELFError) as problem:
        missing = f"machine code not read: {problem}"
    gpu = find_gpu()
    state = (staged / LIBRARY).stat()
    return Build(
        variant=variant.name,
        arch=arch,
        key=digest([recipe.request_key(variant, arch), toolchain_key(toolchain), inputs.key_parts]),
        library="",
        code_identity=identity,
        code_identity_missing=missing,
        kernels=kernels,
        advisories=advisories,
        command=recipe.shown_command(variant, arch),
        compiler=toolchain.title,
        built_on=f"{platform.system()} {platform.machine()}, {gpu.name if gpu else 'no GPU'}",
        built_at=datetime.fromtimestamp(state.st_mtime, UTC).isoformat(timespec="seconds"),
        build_seconds=finished.seconds,
        environment=recipe.compiler_environment(variant),
        files={name: file_hash(str(staged / name)) or "" for name in recipe.published_files(variant)},
        shared_by=tuple(each.name for each in variants) if len(variants) > 1 else (),
    )


def _edited_since(inputs: CompiledFrom, variant: Variant, folder: Path, started_ns: int) -> str:
    """Return files that changed after the build began: their hash may not be that of the code that was compiled.

    A file that appeared meanwhile may not be the one that the compiler found.
    """
    paths = {cached.dependency_path(path, variant, folder): path for path, _ in inputs.dependencies}
    paths = {**{path: Path(path).name for path in inputs.seen}, **paths}
    edited = [path for real_path, path in paths.items() if os.stat(real_path).st_ctime_ns >= started_ns]  # noqa: PTH116
    return ", ".join(sorted(edited)[:3])


def _compile_error(unit: Unit, staged: Path) -> str:
    """Return why a build failed.  If it lacks its entry, the source is compiled again to read what it exports."""
    log = _log(staged)
    command = recipe.object_command(unit.first, unit.arch, unit.toolchain)
    if command and lacks_entry(log):
        run_jobs(staged, [CompileJob(".", OBJECT, tuple(command), unit.title)], lambda *_: None)
        if (staged / OBJECT).is_file():
            return entry_problem(unit.first.entry.source, staged / OBJECT, interface_of(unit.first))
    return compile_error(log, unit.arch)


def _log(folder: Path) -> str:
    """Return the last part of a compiler's output; on a full disk, where it is incomplete, that there is no space."""
    path = folder / LOG
    full = shutil.disk_usage(folder).free < MIN_FREE_BYTES
    note = f"No space left on device: {folder.parents[1]}\n" if full else ""
    if not path.is_file():
        return f"{note}(no output)"
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
        return note + printable(stream.read().decode(errors="replace"))
