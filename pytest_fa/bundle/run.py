"""One run's artifacts to `manifest.yaml` and `repro_bundle_<commit>_<timestamp>.tar.gz`."""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pytest_fa.bundle.constraints import differences, installed_version, read_constraints
from pytest_fa.records.environment import read_environment
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record
from pytest_fa.records.source import read_source

MANIFEST_SCHEMA = 1
NOT_SOURCE = frozenset({".git", "artifacts", "build", "dist", "__pycache__"})
KEPT_DOT_NAMES = frozenset({".ci", ".github", ".gitignore"})
LARGEST_SOURCE_BYTES = 2**20


def make_bundle(folder: Path, artifacts: Path, records: Path, exit_status: int) -> Path:
    """Write `<artifacts>/manifest.yaml` and the archive beside it; the path of the archive.

    `records` is the run's record file, `exit_status` pytest's.  The archive holds the manifest, everything of
    `artifacts` but earlier archives and records, and the source files, in name order and with one time stamp.
    """
    now = datetime.now(UTC)
    source = read_source(folder)
    manifest = artifacts / "manifest.yaml"
    files = [*_results(artifacts, records), *_source_files(folder)]
    described = describe(folder, records, exit_status, now)
    described["files"] = {str(path.relative_to(folder)): _sha256(path) for path in files if path != manifest}
    manifest.write_text(yaml.safe_dump(described, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
    commit = (source.commit or "unknown")[:12] + ("-dirty" if source.dirty else "")
    archive = artifacts / f"repro_bundle_{commit}_{now:%Y%m%dT%H%M%SZ}.tar.gz"
    _write_archive(archive, [manifest, *files], folder, int(now.timestamp()))
    return archive


def describe(folder: Path, records: Path, exit_status: int, now: datetime) -> dict[str, Any]:
    """What the manifest says beside its files: source, environment, versions, outcomes."""
    found = read_records(records)
    constraints = folder / "constraints.txt"
    pins = read_constraints(constraints) if constraints.is_file() else {}
    return {
        "schema": MANIFEST_SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "source": msgspec.to_builtins(read_source(folder)),
        "environment": msgspec.to_builtins(read_environment()),
        "versions": {package: installed_version(package) for package in pins},
        "differences_from_constraints": [str(each) for each in differences(pins)],
        "compilers": sorted({build.compiler for record in found for build in record.builds}),
        "builds": {f"{build.variant}/{build.arch}": _build_facts(build) for record in found for build in record.builds},
        "pytest_exit_status": exit_status,
        "outcomes": _outcomes(found),
    }


def _build_facts(build: Any) -> dict[str, Any]:  # noqa: ANN401  # a build
    return {
        "key": build.key,
        "code_identity": build.code_identity,
        "built_on": build.built_on,
        "built_at": build.built_at,
    }


def _outcomes(records: list[Record]) -> dict[str, dict[str, int]]:
    """How many records of each kind ended how."""
    kinds: dict[str, Counter[str]] = {}
    for record in records:
        kinds.setdefault(record.kind, Counter())[record.outcome] += 1
    return {kind: dict(counts) for kind, counts in kinds.items()}


def _results(artifacts: Path, records: Path) -> list[Path]:
    """The run's own files: what lies in `artifacts` itself, and this run's records."""
    made_here = ("manifest.yaml", "repro_bundle_")
    files = [path for path in sorted(artifacts.iterdir()) if path.is_file() and not path.name.startswith(made_here)]
    return [*files, records]


def _source_files(folder: Path) -> list[Path]:
    """What git tracks; without git, every file under 1 MB outside build outputs, environments and caches."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True, check=False)  # noqa: S607
    if listed.returncode == 0 and listed.stdout:
        paths = [folder / name for name in listed.stdout.decode().split("\0") if name]
        return [path for path in paths if path.is_file()]
    return sorted(path for path in _walk(folder) if path.stat().st_size < LARGEST_SOURCE_BYTES)


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        hidden = path.name.startswith(".") and path.name not in KEPT_DOT_NAMES
        if hidden or path.name in NOT_SOURCE or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _write_archive(archive: Path, files: list[Path], folder: Path, timestamp: int) -> None:
    """A tar whose bytes depend on names and contents alone: fixed order, owner and time."""
    root = archive.name.removesuffix(".tar.gz")
    scratch = archive.with_suffix(".tmp")
    with (
        scratch.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=timestamp) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in sorted(dict.fromkeys(files)):
            member = tarfile.TarInfo(f"{root}/{path.relative_to(folder)}")
            data = path.read_bytes()
            member.size, member.mtime = len(data), timestamp
            member.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(member, io.BytesIO(data))
    scratch.replace(archive)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
