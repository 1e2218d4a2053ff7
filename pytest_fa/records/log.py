"""Records to files: one line each as they come, so that a run that is killed loses nothing it had measured."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pytest_fa.records.built import Build
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.timing import LaunchedKernel


class RecordLog:
    """A run's own file, `<folder>/records/<UTC time>-<pid>.jsonl`; made with the first record."""

    def __init__(self, folder: Path) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = folder / "records" / f"{stamp}-{os.getpid()}.jsonl"

    def append(self, record: Record) -> None:
        """Write one line and hand it to the system."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            stream.write(to_json(record) + b"\n")


def save_records(records: list[Record], folder: Path, root: Path | None = None) -> list[Path]:
    """Keep records under `<folder>/<gpu>/<variant>.jsonl`, with paths from the run's `root` on.

    A line replaces the older one of the same kind and id, a gate's that of the same question; all other lines stay.
    What a build's kernels are stands once in a file, with the first record of the build: hundreds of records share it.
    Written beside and renamed, so that a kill leaves the old file whole.
    """
    files: dict[Path, list[Record]] = {}
    for record in records:
        files.setdefault(saved_path(folder, record), []).append(record)
    for path, fresh in files.items():
        kept = {_key(each): each for each in (*read_records(path), *fresh)}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        once = _with_kernels_once([kept[key] for key in sorted(kept)])
        lines = [*_foreign_lines(path), *(_portable(to_json(each), root) for each in once)]
        scratch.write_bytes(b"".join(line + b"\n" for line in lines))
        scratch.replace(path)
    return list(files)


def _key(record: Record) -> tuple[str, ...]:
    """What a record is about; a gate's id is its variant's name, and its repeat line has ratio, baseline and cases."""
    return (record.kind, record.id, *((record.rerun_command,) if record.kind == "gate" else ()))


def _portable(line: bytes, root: Path | None) -> bytes:
    """What is kept says nothing of where a machine has its folders: neither the run's nor the interpreter's."""
    line = re.sub(rb'"/[^"]*/bin/python[0-9.]*"', b'"python"', line)
    return line.replace(f"{root}/".encode(), b"") if root else line


def saved_path(folder: Path, record: Record) -> Path:
    """The file that keeps a record's variant on its GPU."""
    return folder / gpu_folder(record.environment.gpu) / _file_name(record.variant)


def _saved_paths(folder: Path, variant: str) -> list[Path]:
    """A variant's files of every GPU."""
    return sorted(folder.glob(f"*/{_file_name(variant)}"))


def _file_name(variant: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", variant) + ".jsonl"


def read_records(path: Path) -> list[Record]:
    """The records of a file, each whole; lines of another schema are left out.  No file, no records."""
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    return _with_all_kernels([record for line in lines if (record := _read_line(line)) is not None])


def _with_kernels_once(records: list[Record]) -> list[Record]:
    """The records, of which only the first with a build says what its kernels are."""
    said: set[tuple[str, ...]] = set()

    def once(build: Build) -> Build:
        if _identity(build) in said:
            return msgspec.structs.replace(build, kernels=())
        if build.kernels:
            said.add(_identity(build))
        return build

    return [msgspec.structs.replace(each, builds=tuple(once(build) for build in each.builds)) for each in records]


def _with_all_kernels(records: list[Record]) -> list[Record]:
    """The inverse."""
    said = {_identity(build): build.kernels for each in records for build in each.builds if build.kernels}

    def whole(build: Build) -> Build:
        return build if build.kernels else msgspec.structs.replace(build, kernels=said.get(_identity(build), ()))

    return [msgspec.structs.replace(each, builds=tuple(whole(build) for build in each.builds)) for each in records]


def _identity(build: Build) -> tuple[str, ...]:
    """What no two different builds share: the key is that of source, command and compiler."""
    return (build.variant, build.arch, build.key, build.code_identity or "", build.built_at)


def _read_line(line: bytes) -> Record | None:
    try:
        return read_record(line)
    except msgspec.MsgspecError:
        return None


def _foreign_lines(path: Path) -> list[bytes]:
    """Lines of another schema: kept as they are."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [line for line in lines if line and _read_line(line) is None]


def stale_variants(records: list[Record], folder: Path) -> list[str]:
    """Variants whose saved records, on whatever GPU, were measured with other machine code than this run's.

    A run without a GPU compiles as well, and so it tells.
    """
    now = {
        (each.variant, build.arch): build.code_identity
        for each in records
        for build in each.builds
        if build.code_identity
    }
    stale = []
    for variant in dict.fromkeys(record.variant for record in records):
        paths = _saved_paths(folder, variant)
        saved = {
            (build.arch, build.code_identity) for path in paths for each in read_records(path) for build in each.builds
        }
        if any(now.get((variant, arch), identity) != identity for arch, identity in saved if identity):
            stale.append(variant)
    return stale


def saved_launches(folder: Path, variants: list[str]) -> dict[tuple[str, str], LaunchedKernel]:
    """How saved records of these variants launched their kernels, whatever the GPU, by variant and kernel name.

    By the demangled name, which does not change when a parameter's type is renamed.
    """
    launches: dict[tuple[str, str], LaunchedKernel] = {}
    for variant in variants:
        for path in _saved_paths(folder, variant):
            for record in read_records(path):
                names = {kernel.mangled: kernel.name for build in record.builds for kernel in build.kernels}
                for launch in record.speed.launches if record.speed else ():
                    launches[(variant, names.get(launch.mangled, launch.mangled))] = launch
    return launches
