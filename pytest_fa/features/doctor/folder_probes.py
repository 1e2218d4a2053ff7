"""Probes of the folders that a run uses: the cache of builds, the kernels and the records."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.features.doctor.finding import Finding, Places

GIB = 2**30
MIN_FREE_BYTES = GIB  # all builds of the ladder and one bundle are smaller
MAX_PROBLEMS = 5


def probe_cache(places: Places) -> Iterator[Finding]:
    """Whether the cache of builds can be used, its size, and the free space."""
    from pytest_fa.build.cache import require_safe  # noqa: PLC0415  # msgspec may be missing

    cache = places.cache
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if problem := _write_problem(existing):
        advice = "make it a writable folder, or give another one with --fa-cache"
        yield Finding("missing", "cache", f"{cache} cannot be written: {existing}: {problem}", advice)
        return
    try:
        require_safe(cache)
    except UsageProblem as unsafe:
        yield Finding("missing", "cache", str(unsafe))
        return
    free = shutil.disk_usage(existing).free
    text = f"{cache}, {_shown(_size_of(cache))} of builds, {_shown(free)} free"
    if free < MIN_FREE_BYTES:
        yield Finding("warning", "cache", text, "free some space, or give another folder with --fa-cache")
    else:
        yield Finding("ok", "cache", text)


def probe_kernels(places: Places) -> Iterator[Finding]:
    """The variants of the kernels folder, and each manifest that cannot be read."""
    from pytest_fa.catalog.discover import discover  # noqa: PLC0415  # yaml may be missing

    folder = places.kernels
    catalog = discover((folder,) if folder.is_dir() else ())
    own = [each for each in catalog.variants.values() if Path(each.root).resolve() == folder.resolve()]
    if own:
        yield Finding("ok", "kernels", f"{folder}: {len(own)} variant{'s' * (len(own) != 1)}")
    else:
        text = f"{folder}: {'no <variant>/variant.yaml in it' if folder.is_dir() else 'no such folder'}"
        yield Finding("warning", "kernels", text, "`python -m pytest_fa new NAME` writes a variant")
    broken = list(catalog.broken.values())
    for variant in broken[:MAX_PROBLEMS]:
        yield Finding("warning", "kernels", f"broken: {variant.problem}")
    if len(broken) > MAX_PROBLEMS:
        yield Finding("warning", "kernels", f"{len(broken) - MAX_PROBLEMS} more are broken", "see pytest --fa-list")


def probe_records(places: Places) -> Iterator[Finding]:
    """The saved records of each GPU, and each file that cannot be read completely."""
    from pytest_fa.records.files import read_record_file  # noqa: PLC0415  # msgspec may be missing

    folder = places.records
    if not folder.is_dir():
        yield Finding("ok", "records", f"{folder}: none yet; --fa-save writes them")
        return
    paths = sorted(folder.glob("*/*.jsonl"))
    gpus = sorted({path.parent.name for path in paths})
    yield Finding("ok", "records", f"{folder}: {len(paths)} files of {', '.join(gpus) or 'no GPU'}")
    incomplete = [file for path in paths if (file := read_record_file(path)).complaint]
    for file in incomplete[:MAX_PROBLEMS]:
        yield Finding("warning", "records", f"{file.path}: {file.complaint}", "--fa-save adds new records to it")
    if len(incomplete) > MAX_PROBLEMS:
        yield Finding("warning", "records", f"{len(incomplete) - MAX_PROBLEMS} more files cannot be read completely")


def _write_problem(folder: Path) -> str:
    """Why no file can be written to the folder; empty if one can.  The file that is tried has no name."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as problem:
        return problem.strerror or str(problem)


def _size_of(folder: Path) -> int:
    """The bytes of all files below a folder, as far as they can be read."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(Path(place) / name).st_size
            except OSError:
                continue  # another run has just deleted it
    return total


def _shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
