"""Whether the files of a build are still those that were built.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_fa.build.keys import file_hash
from pytest_fa.errors import ChangedBuild

SHOWN_DIGITS = 16


def change_of(path: Path, sha256: str) -> str:
    """Return how a file differs from the one whose hash was recorded, with both hashes; empty if it does not."""
    actual = file_hash(str(path))
    if actual == sha256:
        return ""
    if actual is None:
        return "cannot be read"
    return (
        f"has changed since it was built: its sha256 is {actual[:SHOWN_DIGITS]}..., "
        f"that of the build {sha256[:SHOWN_DIGITS]}..."
    )


def require_unchanged(library: str | None, file_hashes: Mapping[str, str]) -> None:
    """Raise `ChangedBuild` unless every file of a build has its recorded sha256.

    The judge, or the process of a profiler, calls it immediately before the library is loaded.  `file_hashes` has the
    names of the library and of the files beside it; it is empty for a variant that is not built.
    """
    for name, sha256 in file_hashes.items():
        path = Path(library or "").with_name(name)
        if change := change_of(path, sha256):
            raise ChangedBuild(f"{path} {change}; it was not loaded. The next run compiles it again")
