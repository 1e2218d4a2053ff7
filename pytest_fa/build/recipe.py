"""Dispatch by the kind of a variant: nvcc with the shared binding, or torch.utils.cpp_extension."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from pytest_fa.build import command, extension
from pytest_fa.build.keys import digest
from pytest_fa.build.lookups import CompiledFrom
from pytest_fa.build.ninja import parallel_jobs
from pytest_fa.build.side_by_side import DEVICE
from pytest_fa.build.toolchain import Toolchain, find_toolchain
from pytest_fa.catalog.variant import Target, Variant


def toolchain_for(variant: Variant, cache: Path) -> Toolchain:
    """Return the toolchain that compiles `variant` on this machine.  Raises `ToolchainError` if it is not complete."""
    return extension.find_extension_toolchain(cache, variant) if _is_extension(variant) else find_toolchain(cache)


def request_key(variant: Variant, arch: Target) -> str:
    """Return the key of the flags, definitions and file names; for a PyTorch extension, also of the PyTorch version."""
    return digest((extension if _is_extension(variant) else command).request_parts(variant, arch))


class ParallelPlan(NamedTuple):
    """How many builds of a batch run in parallel, and what runs in parallel within a build.

    An extension compiles up to `files_at_once` of its own files in parallel.  With `side_by_side`, the device code and
    the host code of a CUDA variant are compiled at the same time.
    """

    builds_at_once: int
    files_at_once: int
    side_by_side: bool


def parallel_plan(variants: list[Variant]) -> ParallelPlan:
    """Share the compilers that fit into this machine's memory and cores among the builds of a batch.

    All builds come first.  What is left goes to the files of extensions, so the product never exceeds the limit, and to
    the two parts of CUDA variants.
    """
    most = parallel_jobs()
    most_files = max((len(variant.entry.sources) for variant in variants if _is_extension(variant)), default=1)
    for_one_build = most // max(1, len(variants))
    files_at_once = max(1, min(most_files, for_one_build))
    return ParallelPlan(most // files_at_once, files_at_once, side_by_side=for_one_build > 1)


def stage(
    variant: Variant, arch: Target, folder: Path, toolchain: Toolchain, binding: Path, plan: ParallelPlan
) -> list[str]:
    """Write the files of a staging folder, and return the command that creates `kernel.so` there."""
    if _is_extension(variant):
        key = digest([request_key(variant, arch), command.toolchain_key(toolchain)])
        return extension.stage(variant, arch, folder, toolchain, key, plan.files_at_once)
    return command.stage(variant, arch, folder, toolchain, binding, side_by_side=plan.side_by_side)


def inputs(variant: Variant, arch: Target, toolchain: Toolchain, staged: Path) -> CompiledFrom:
    """Return what a staged library was compiled from: files with their hashes, and what the compiler looked up.

    Raises `ToolchainError` if the compiler does not say where it searches.
    """
    if _is_extension(variant):
        return extension.read_inputs(variant, toolchain, staged)
    return command.read_inputs(variant, arch, toolchain, staged)


def shown_command(variant: Variant, arch: Target) -> tuple[str, ...]:
    """Return the command for the record: without paths of this machine, with the defines as options."""
    if _is_extension(variant):
        return (*extension.shown_command(variant, arch), *_defines(variant))
    flags = [flag for flag in command.compile_flags(variant, arch) if flag != command.INCLUDE_DEFINES]
    return ("nvcc", *flags, *_defines(variant), f"src/{variant.entry.source}")


def failed_command(variant: Variant, arch: Target, toolchain: Toolchain) -> tuple[str, ...]:
    """Return the command to show after a failed compilation."""
    return shown_command(variant, arch) if _is_extension(variant) else _by_hand(variant, arch, toolchain)


def object_command(variant: Variant, arch: Target, toolchain: Toolchain) -> list[str]:
    """Return the command that only compiles the source of a failed build; empty for a PyTorch extension."""
    return [] if _is_extension(variant) else command.object_command(variant, arch, toolchain)


def _by_hand(variant: Variant, arch: Target, toolchain: Toolchain) -> tuple[str, ...]:
    """Return nvcc's command with the defines as options, for a user who runs it by hand."""
    words = command.compile_command(variant, arch, toolchain)
    at = words.index(command.INCLUDE_DEFINES)
    return (*words[:at], *_defines(variant), *words[at + 1 :])


def _defines(variant: Variant) -> list[str]:
    return [f"-D{name}={value}" for name, value in variant.defines.items()]


def compiler_environment(variant: Variant) -> dict[str, str]:
    """Return the environment variables that are set and change what the compilers of this variant do."""
    own = command.compiler_environment()
    return {**own, **extension.extension_environment()} if _is_extension(variant) else own


def published_files(variant: Variant) -> tuple[str, ...]:
    """Return the files of a build that are read when it is loaded."""
    return (command.LIBRARY, extension.MODULE_NAME) if _is_extension(variant) else (command.LIBRARY,)


def remove_scratch_files(variant: Variant, staged: Path) -> None:
    """Delete the files of a staging folder that a published build does not need."""
    if not _is_extension(variant):
        links = (staged / name for name in (*command.links(variant), "binding"))
        for path in (*links, *command.intermediate_files(staged)):
            path.unlink()
        shutil.rmtree(staged / DEVICE, ignore_errors=True)
        return
    for name in extension.SCRATCH:
        path = staged / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def needs_binding(variant: Variant) -> bool:
    """Return whether the shared binding is linked in; a PyTorch extension has its own."""
    return not _is_extension(variant)


def _is_extension(variant: Variant) -> bool:
    return variant.entry.kind == "torch"
