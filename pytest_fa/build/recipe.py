"""How a build is made: by nvcc with our binding, or by PyTorch's own builder for an extension of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from pytest_fa.build import command, extension
from pytest_fa.build.keys import Dependency, digest
from pytest_fa.build.ninja import parallel_jobs
from pytest_fa.build.toolchain import Toolchain, find_toolchain
from pytest_fa.catalog.variant import Target, Variant


def toolchain_for(variant: Variant, cache: Path) -> Toolchain:
    """What compiles it on this machine.  Raises `ToolchainError`."""
    return extension.find_extension_toolchain(cache, variant) if _is_extension(variant) else find_toolchain(cache)


def request_key(variant: Variant, arch: Target) -> str:
    """What is asked for; for an extension of PyTorch, with which PyTorch."""
    return digest(extension.request(variant, arch) if _is_extension(variant) else command.request(variant, arch))


def stage(variant: Variant, arch: Target, folder: Path, toolchain: Toolchain, binding: Path) -> list[str]:
    """Fill a staging folder; the command that makes `kernel.so` there."""
    if _is_extension(variant):
        key = digest([request_key(variant, arch), command.toolchain_key(toolchain)])
        return extension.stage(variant, arch, folder, toolchain, key)
    return command.stage(variant, arch, folder, toolchain, binding)


def dependencies(variant: Variant, staged: Path) -> tuple[Dependency, ...]:
    """The files that a staged library was made from."""
    return extension.read_dependencies(variant, staged) if _is_extension(variant) else command.read_dependencies(staged)


def shown_command(variant: Variant, arch: Target) -> tuple[str, ...]:
    """The command without this machine's paths, for the record."""
    if _is_extension(variant):
        return extension.shown_command(variant, arch)
    return ("nvcc", *command.compile_flags(variant, arch), f"src/{variant.entry.source}")


def failed_command(variant: Variant, arch: Target, toolchain: Toolchain) -> tuple[str, ...]:
    """The command to quote where it failed."""
    if _is_extension(variant):
        return extension.shown_command(variant, arch)
    return tuple(command.compile_command(variant, arch, toolchain))


def tidy(variant: Variant, staged: Path) -> None:
    """Take away what a published build does not need."""
    if not _is_extension(variant):
        for name in (*command.links(variant), "binding"):
            (staged / name).unlink()
        return
    for name in extension.SCRATCH:
        path = staged / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def jobs_at_once(variant: Variant) -> int:
    """How many are compiled side by side: an extension's files are, already."""
    return max(1, parallel_jobs() // extension.INNER_JOBS) if _is_extension(variant) else parallel_jobs()


def needs_binding(variant: Variant) -> bool:
    """Whether our binding is linked in: an extension of PyTorch has its own."""
    return not _is_extension(variant)


def _is_extension(variant: Variant) -> bool:
    return variant.entry.kind == "torch"
