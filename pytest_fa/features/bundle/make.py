"""Write a run's `manifest.yaml` and the archive `repro_bundle_<commit>_<timestamp>.tar.gz`."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pytest_fa.errors import UsageProblem
from pytest_fa.features.bundle.bundle_manifest import (
    MANIFEST,
    MANIFEST_SCHEMA,
    RESULTS,
    BundleManifest,
    builds_of,
    compilers_of,
    outcomes_of,
    problem_of_status,
    to_yaml,
)
from pytest_fa.features.bundle.completeness import changed_sources
from pytest_fa.features.bundle.constraints import differences, installed_version, read_constraints
from pytest_fa.features.bundle.libraries import named_in, packed_libraries
from pytest_fa.features.bundle.privacy import private_names, without_private_names
from pytest_fa.features.bundle.seal import SEAL, digest_of, git_tree, make_seal
from pytest_fa.records.environment import read_environment
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record, Source
from pytest_fa.records.source import read_source
from pytest_fa.records.text import printable
from pytest_fa.records.written import require_written

NOT_SOURCE = frozenset({"artifacts", "build", "dist", "site"})  # in the top folder
KEPT_DOT_NAMES = frozenset({".ci", ".github", ".gitignore"})
LARGEST_SOURCE_BYTES = 2**20  # of a file that git does not track


class PackedFile(msgspec.Struct, frozen=True):
    """One file of a bundle."""

    content: bytes
    is_executable: bool = False


class Bundle(msgspec.Struct, frozen=True):
    """A written bundle: its archive, and its digest, which is the sha256 of its seal.

    `libraries` counts the files of packed libraries, and `names` are those of this machine and its user in them.
    """

    archive: Path
    digest: str
    libraries: int = 0
    names: tuple[str, ...] = ()


def make_bundle(
    folder: Path, artifacts: Path, records: Path, exit_status: int, libraries_of: Path | None = None
) -> Bundle:
    """Write `<artifacts>/manifest.yaml` and the archive next to it.

    `records` is the run's record file, `exit_status` that of pytest.  The archive holds the manifest, the files
    directly in `artifacts` (without earlier archives), the record file, the source files and the seal, in name order
    and with the same time.  Names of this machine and its user are replaced in results, except in libraries.
    `libraries_of` is the build cache with the libraries of the run, if the archive is to hold them.

    Raises `UnreadableRecords` if a record cannot be read, and `UsageProblem` for a place outside of `folder`, a record
    file that is not what its run wrote, a changed source, or an exit status that is not that of the run.
    """
    _require_places(folder, artifacts, records)
    now = datetime.now(UTC)
    run_records, written = read_records(records), require_written(records)
    _require_status(exit_status, written.exit_status, run_records)
    source_files, left_out = _source_files(folder)
    _require_judged_sources(run_records, source_files)
    tree = git_tree((name, _blob(file.content), file.is_executable) for name, file in source_files.items())
    source = _with_tree_compared(read_source(folder), tree, folder)
    results = _results(folder, artifacts, records)
    libraries = packed_libraries(run_records, libraries_of) if libraries_of else {}
    constraints = folder / "constraints.txt"
    pins = read_constraints(constraints) if constraints.is_file() else {}
    manifest = BundleManifest(
        schema=MANIFEST_SCHEMA,
        created=now.isoformat(timespec="seconds"),
        source=source,
        source_tree=tree,
        left_out=left_out,
        environment=read_environment(),
        versions={package: installed_version(package) for package in pins},
        differences_from_constraints=tuple(str(difference) for difference in differences(pins)),
        compilers=compilers_of(run_records),
        builds=builds_of(run_records),
        records=str(records.relative_to(folder)),
        written=written,
        pytest_exit_status=exit_status,
        outcomes=outcomes_of(run_records),
    )
    names = private_names(folder)
    (artifacts / "manifest.yaml").write_text(to_yaml(manifest), encoding="utf-8")
    results[MANIFEST] = PackedFile(to_yaml(manifest).encode())
    commit = (source.commit or "unknown")[:12] + ("-dirty" if source.dirty else "")
    archive = artifacts / f"repro_bundle_{commit}_{now:%Y%m%dT%H%M%SZ}.tar.gz"
    packed = {name: PackedFile(content) for name, content in libraries.items()}
    bundle = _write_archive(archive, {**source_files, **_cleaned(results, names), **packed}, int(now.timestamp()))
    return msgspec.structs.replace(bundle, libraries=len(packed), names=tuple(named_in(libraries, names)))


def _require_places(folder: Path, artifacts: Path, records: Path) -> None:
    """Require that all results are where `verify` looks for them: in the folder `artifacts` of the source folder."""
    allowed = folder / "artifacts"
    for option, path in (("--artifacts", artifacts), ("--records", records)):
        if not path.is_relative_to(allowed):
            remedy = f"copy it there, or give the source folder of {path} as --folder"
            raise UsageProblem(printable(f"{option}: {path} is not in {allowed}, as all results must be; {remedy}"))
    if not artifacts.is_dir():
        raise UsageProblem(printable(f"--artifacts: there is no folder {artifacts}; give the one of --fa-artifacts"))
    if not records.exists():
        remedy = "give a file that the run wrote, such as artifacts/records/*.jsonl"
        raise UsageProblem(printable(f"--records: there is no file {records}; {remedy}"))


def _require_status(exit_status: int, written: int, records: list[Record]) -> None:
    if problem := problem_of_status(exit_status, records):
        raise UsageProblem(f"{problem}; give pytest's own exit status")
    if exit_status != written:
        raise UsageProblem(f"--exit-status: {exit_status}; the run ended with {written}")


def _require_judged_sources(records: list[Record], files: dict[str, PackedFile]) -> None:
    hashes = {name: hashlib.sha256(file.content).hexdigest() for name, file in files.items()}
    if problem := next(changed_sources(records, hashes), ""):
        raise UsageProblem(f"{printable(problem)}; it was changed since the run: repeat the run")


def _results(folder: Path, artifacts: Path, records: Path) -> dict[str, PackedFile]:
    """Return the files directly in `artifacts`, without bundles and their replays, and this run's record file."""
    bundle_names = ("manifest.yaml", "repro_bundle_", "replay_")
    paths = [path for path in artifacts.iterdir() if path.is_file() and not path.name.startswith(bundle_names)]
    return {str(path.relative_to(folder)): PackedFile(path.read_bytes()) for path in (*paths, records)}


def _cleaned(results: dict[str, PackedFile], names: dict[str, str]) -> dict[str, PackedFile]:
    contents = {name: without_private_names(file.content, names) for name, file in results.items()}
    return {name: msgspec.structs.replace(file, content=contents[name]) for name, file in results.items()}


def _source_files(folder: Path) -> tuple[dict[str, PackedFile], tuple[str, ...]]:
    """Return the source files by name, and a line for each one that is left out.

    Source files are those that git tracks, and those that it neither tracks nor ignores: a variant that was judged may
    not be committed yet.  Without git, they are all files outside build outputs, environments and caches.
    """
    tracked = _git_files(folder, "--cached")
    names = [*tracked, *_git_files(folder, "--others", "--exclude-standard")] if tracked else sorted(_walk(folder))
    files: dict[str, PackedFile] = {}
    left_out = []
    for name in dict.fromkeys(names):
        path = folder / name
        if name.startswith(RESULTS):
            left_out.append(f"{name}: no source, because it lies in {RESULTS}")
        elif reason := _why_left_out(path, folder, is_tracked=name in set(tracked)):
            left_out.append(f"{name}: {reason}")
        elif path.is_file():
            files[name] = PackedFile(path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return files, tuple(left_out)


def _why_left_out(path: Path, folder: Path, *, is_tracked: bool) -> str:
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        return "a link that leads out of the source folder"
    if not path.exists():
        return "deleted" if is_tracked else "not there"
    if not path.is_file():
        return "not a regular file"
    size = path.stat().st_size
    if not is_tracked and size > LARGEST_SOURCE_BYTES:
        return f"not tracked by git, and larger than {LARGEST_SOURCE_BYTES} bytes"
    return ""


def _with_tree_compared(source: Source, tree: str, folder: Path) -> Source:
    """Return the source, dirty if the tree of its commit is not that of the packed files; without git, unchanged.

    The commit may be that of a stamp, whose hashes say nothing about files that were added.
    """
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{source.commit}:./")
    expected = _git_output(folder, *words).decode().strip() if source.commit else ""
    return msgspec.structs.replace(source, dirty=True) if expected not in ("", tree) else source


def _git_files(folder: Path, *options: str) -> list[str]:
    """Return the names that `git ls-files` prints; none without git."""
    return [os.fsdecode(name) for name in _git_output(folder, "ls-files", "-z", *options).split(b"\0") if name]


def _git_output(folder: Path, *words: str) -> bytes:
    """Return what a git command prints; nothing if it fails, or if there is no git."""
    try:
        run = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False, timeout=60)  # noqa: S603, S607
    except OSError:
        return b""
    return run.stdout if run.returncode == 0 else b""


def _walk(folder: Path, prefix: str = "") -> Iterator[str]:
    for path in folder.iterdir():
        hidden = path.name.startswith(".") and path.name not in KEPT_DOT_NAMES
        is_output = path.name == "__pycache__" or path.name.endswith(".egg-info")
        if hidden or is_output or (not prefix and path.name in NOT_SOURCE):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path, f"{prefix}{path.name}/")
        else:
            yield f"{prefix}{path.name}"


def _write_archive(archive: Path, files: dict[str, PackedFile], timestamp: int) -> Bundle:
    """Write a tar file whose bytes depend only on names, contents and `timestamp`: order and owner are fixed."""
    root = archive.name.removesuffix(".tar.gz")
    seal = make_seal({name: hashlib.sha256(file.content).hexdigest() for name, file in files.items()})
    scratch = archive.with_suffix(".tmp")
    with (
        scratch.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=timestamp) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, file in sorted({**files, SEAL: PackedFile(seal)}.items()):
            member = tarfile.TarInfo(f"{root}/{name}")
            member.size, member.mtime = len(file.content), timestamp
            member.mode = 0o755 if file.is_executable else 0o644
            tar.addfile(member, io.BytesIO(file.content))
    scratch.replace(archive)
    return Bundle(archive, digest_of(seal))


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
