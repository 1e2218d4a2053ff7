"""A record file lists the kernels of each build once: hundreds of its records may have the same build."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pytest_fa.records.built import Build
from pytest_fa.records.record import Record


def with_kernels_once(records: Iterable[Record]) -> list[Record]:
    """Return the records, with the kernels of each build listed only in the first record that has it."""
    listed: set[tuple[str, ...]] = set()

    def shorten(build: Build) -> Build:
        if _identity(build) in listed:
            return msgspec.structs.replace(build, kernels=())
        if build.kernels:
            listed.add(_identity(build))
        return build

    return [_with_builds(record, shorten) for record in records]


def with_all_kernels(records: list[Record]) -> list[Record]:
    """Return the records with the kernels of each build listed in every record that has it."""
    kernels = {_identity(build): build.kernels for record in records for build in record.builds if build.kernels}

    def complete(build: Build) -> Build:
        return build if build.kernels else msgspec.structs.replace(build, kernels=kernels.get(_identity(build), ()))

    return [_with_builds(record, complete) for record in records]


def _with_builds(record: Record, change: Callable[[Build], Build]) -> Record:
    return msgspec.structs.replace(record, builds=tuple(change(build) for build in record.builds))


def _identity(build: Build) -> tuple[str, ...]:
    """Return a tuple that differs between any two builds; `key` covers the sources, the command and the compiler."""
    return (build.variant, build.arch, build.key, build.code_identity or "", build.built_at)
