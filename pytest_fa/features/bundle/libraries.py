"""The built libraries in a bundle: `artifacts/cache/` is a build cache for `--fa-cache` with `--fa-no-build`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.records.built import Build
from pytest_fa.records.record import Record

LIBRARIES = "artifacts/cache/"
STORED = "build.json"  # what the cache knows of a build; it stands beside the library


def packed_libraries(records: Iterable[Record], cache: Path) -> dict[str, bytes]:
    """Return the files of every build of the records by their names in the bundle.

    Raises `UsageProblem` if a file is not in the cache, or is not the one that was run, or if its hash is not known.
    """
    files: dict[str, bytes] = {}
    for build in _builds(records):
        folder = Path(build.library).parent
        if not build.files:
            raise UsageProblem(
                f"--with-libraries: the record of {build.variant}/{build.arch} has no hash of its library"
            )
        for name in (*build.files, STORED):
            files[f"{LIBRARIES}{folder / name}"] = _content(cache, folder / name, build)
    return files


def library_problems(records: Iterable[Record], hashes: Mapping[str, str]) -> Iterator[str]:
    """Compare the libraries of a bundle, given by name and sha256, with those that the records name."""
    expected = {
        f"{LIBRARIES}{Path(build.library).parent / name}": sha256
        for build in _builds(records)
        for name, sha256 in build.files.items()
    }
    packed = {name: sha256 for name, sha256 in hashes.items() if name.startswith(LIBRARIES)}
    if not packed:
        return
    for name in sorted(expected.keys() | packed.keys()):
        if name not in packed:
            yield f"{name} is missing, although the bundle has libraries"
        elif name in expected and expected[name] != packed[name]:
            yield f"{name} is not the library that the records name: its sha256 differs"
        elif name not in expected and not _is_stored_of(name, expected):
            yield f"{name} belongs to no build of the records"


def named_in(files: Mapping[str, bytes], names: Iterable[str]) -> list[str]:
    """Return the names of this machine and its user that the files contain; in a library they cannot be replaced."""
    return sorted(name for name in names if any(name.encode() in content for content in files.values()))


def _builds(records: Iterable[Record]) -> list[Build]:
    """The builds of the records, each library once."""
    return list({build.library: build for record in records for build in record.builds}.values())


def _content(cache: Path, path: Path, build: Build) -> bytes:
    remedy = f"run {build.variant} again, or give the folder of --fa-cache as --cache"
    try:
        content = (cache / path).read_bytes()
    except OSError:
        raise UsageProblem(f"--with-libraries: {path} is not in the cache {cache}; {remedy}") from None
    expected = build.files.get(path.name)
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise UsageProblem(f"--with-libraries: {path} in the cache {cache} is not the library that was run; {remedy}")
    return content


def _is_stored_of(name: str, expected: Mapping[str, str]) -> bool:
    """Whether a file is the `build.json` beside a library that the records name."""
    folder, _, file = name.rpartition("/")
    return file == STORED and any(other.rpartition("/")[0] == folder for other in expected)
