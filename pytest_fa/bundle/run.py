"""Write a run's `manifest.yaml` and the archive `repro_bundle_<commit>_<timestamp>.tar.gz`."""

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
from pytest_fa.records.built import Build
from pytest_fa.records.environment import read_environment
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record
from pytest_fa.records.source import read_source

MANIFEST_SCHEMA = 1
NOT_SOURCE = frozenset({".git", "artifacts", "build", "dist", "__pycache__"})
KEPT_DOT_NAMES = frozenset({".ci", ".github", ".gitignore"})
LARGEST_SOURCE_BYTES = 2**20


def make_bundle(folder: Path, artifacts: Path, records: Path, exit_status: int) -> Path:
    """Write `<artifacts>/manifest.yaml` and the archive next to it, and return the path of the archive.

    `records` is the run's record file, `exit_status` that of pytest.  The archive holds the manifest, the files
    directly in `artifacts` (without earlier archives), the record file and the source files, in name
    order and with the same time.
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
    """Return the manifest without its file list: source, environment, versions, builds and outcomes."""
    run_records = read_records(records)
    builds = [build for record in run_records for build in record.builds]
    constraints = folder / "constraints.txt"
    pins = read_constraints(constraints) if constraints.is_file() else {}
    return {
        "schema": MANIFEST_SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "source": msgspec.to_builtins(read_source(folder)),
        "environment": msgspec.to_builtins(read_environment()),
        "versions": {package: installed_version(package) for package in pins},
        "differences_from_constraints": [str(difference) for difference in differences(pins)],
        "compilers": sorted({build.compiler for build in builds}),
        "builds": {f"{build.variant}/{build.arch}": _build_facts(build) for build in builds},
        "pytest_exit_status": exit_status,
        "outcomes": _outcomes(run_records),
    }


def _build_facts(build: Build) -> dict[str, Any]:
    return {
        "key": build.key,
        "code_identity": build.code_identity,
        "built_on": build.built_on,
        "built_at": build.built_at,
    }


def _outcomes(records: list[Record]) -> dict[str, dict[str, int]]:
    """Return the number of records by kind and outcome."""
    kinds: dict[str, Counter[str]] = {}
    for record in records:
        kinds.setdefault(record.kind, Counter())[record.outcome] += 1
    return {kind: dict(counts) for kind, counts in kinds.items()}


def _results(artifacts: Path, records: Path) -> list[Path]:
    """Return the files directly in `artifacts`, without earlier bundles, and this run's record file."""
    bundle_names = ("manifest.yaml", "repro_bundle_")
    files = [path for path in sorted(artifacts.iterdir()) if path.is_file() and not path.name.startswith(bundle_names)]
    return [*files, records]


def _source_files(folder: Path) -> list[Path]:
    """Return the files that git tracks.

    Without git, these are all files under 1 MiB outside build outputs, environments and caches.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True, check=False, timeout=60)  # noqa: S607
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
    """Write a tar file whose bytes depend only on names, contents and `timestamp`: order and owner are fixed."""
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
