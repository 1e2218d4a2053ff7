"""Write and read records, one JSON line each; a run that is killed loses none that it has written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pytest_fa.records.built import Build, stable_name
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.timing import LaunchedKernel


class RecordLog:
    """The record file of one run, `<folder>/records/<UTC time>-<pid>.jsonl`; the first record creates it."""

    def __init__(self, folder: Path) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = folder / "records" / f"{stamp}-{os.getpid()}.jsonl"

    def append(self, record: Record) -> None:
        """Append one line and close the file, so that the line survives a kill of this process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            stream.write(to_json(record) + b"\n")


def save_records(records: list[Record], folder: Path, root: Path | None = None) -> list[Path]:
    """Save records in `<folder>/<gpu>/<variant>.jsonl`, with paths relative to `root`; return the files written.

    A record replaces the saved record of the same kind and id; for gates, the rerun command must be equal as well.  All
    other lines stay.  Hundreds of records may share a build, so only the first of them lists its kernels.  The new file
    is written next to the old one and renamed, so that a kill does not damage the old file.
    """
    files: dict[Path, list[Record]] = {}
    for record in records:
        files.setdefault(saved_path(folder, record), []).append(record)
    for path, new_records in files.items():
        kept = {_key(record): record for record in (*read_records(path), *new_records)}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        shortened = _with_kernels_once([kept[key] for key in sorted(kept)])
        lines = [*_unreadable_lines(path), *(_without_local_paths(to_json(record), root) for record in shortened)]
        scratch.write_bytes(b"".join(line + b"\n" for line in lines))
        scratch.replace(path)
    return list(files)


def _key(record: Record) -> tuple[str, ...]:
    """Return the key of a record.

    The id of a gate is only its variant's name; its rerun command adds the ratio, the baseline and the cases.
    """
    return (record.kind, record.id, *((record.rerun_command,) if record.kind == "gate" else ()))


def _without_local_paths(line: bytes, root: Path | None) -> bytes:
    """Remove the run's folder and the interpreter's folder from a line."""
    line = re.sub(rb'"/[^"]*/bin/python[0-9.]*"', b'"python"', line)
    return line.replace(f"{root}/".encode(), b"") if root else line


def saved_path(folder: Path, record: Record) -> Path:
    """Return the file in which a record is saved, by its GPU and variant."""
    return folder / gpu_folder(record.environment.gpu) / _file_name(record.variant)


def _saved_paths(folder: Path, variant: str) -> list[Path]:
    """Return a variant's saved files, one per GPU."""
    return sorted(folder.glob(f"*/{_file_name(variant)}"))


def _file_name(variant: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", variant) + ".jsonl"


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, each with its builds' kernels; skip lines that cannot be read.

    Returns an empty list if there is no such file.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    return _with_all_kernels([record for line in lines if (record := _read_line(line)) is not None])


def _with_kernels_once(records: list[Record]) -> list[Record]:
    """Return the records, with the kernels of each build listed only in the first record that has it."""
    listed: set[tuple[str, ...]] = set()

    def shorten(build: Build) -> Build:
        if _identity(build) in listed:
            return msgspec.structs.replace(build, kernels=())
        if build.kernels:
            listed.add(_identity(build))
        return build

    return [_with_builds(record, shorten) for record in records]


def _with_all_kernels(records: list[Record]) -> list[Record]:
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


def _read_line(line: bytes) -> Record | None:
    try:
        return read_record(line)
    except msgspec.MsgspecError:
        return None


def _unreadable_lines(path: Path) -> list[bytes]:
    """Return the lines that this version cannot read, such as those of a later schema; they are kept unchanged."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [line for line in lines if line and _read_line(line) is None]


def stale_variants(records: list[Record], folder: Path) -> list[str]:
    """Return the variants whose saved records, of any GPU, have other machine code than the builds of this run.

    A run without a GPU also compiles, so it can detect this as well.
    """
    current = {
        (record.variant, build.arch): build.code_identity
        for record in records
        for build in record.builds
        if build.code_identity
    }
    stale = []
    for variant in dict.fromkeys(record.variant for record in records):
        paths = _saved_paths(folder, variant)
        saved = {
            (build.arch, build.code_identity)
            for path in paths
            for record in read_records(path)
            for build in record.builds
        }
        if any(current.get((variant, arch), identity) != identity for arch, identity in saved if identity):
            stale.append(variant)
    return stale


def saved_launches(folder: Path, variants: list[str]) -> dict[tuple[str, str], LaunchedKernel]:
    """Return the saved launches of these variants' kernels, of any GPU, by variant and demangled kernel name.

    The names are those of `stable_name`, which do not change when a type is renamed.
    """
    launches: dict[tuple[str, str], LaunchedKernel] = {}
    for variant in variants:
        for path in _saved_paths(folder, variant):
            for record in read_records(path):
                names = {kernel.mangled: kernel.name for build in record.builds for kernel in build.kernels}
                for launch in record.speed.launches if record.speed else ():
                    launches[(variant, stable_name(names.get(launch.mangled, launch.mangled)))] = launch
    return launches
