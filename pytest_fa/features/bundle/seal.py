"""The seal of a bundle: `SHA256SUMS` lists every other file, and its own hash is the digest of the bundle.

`sha256sum -c SHA256SUMS` checks an unpacked bundle without this program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from pytest_fa.errors import FaError

SEAL = "SHA256SUMS"
_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64})  (?P<name>\S(?:[^\n]*\S)?)")


class BrokenSeal(FaError):
    """A seal that cannot be read."""


def make_seal(files: Mapping[str, str]) -> bytes:
    """Return the seal of files, given by name and sha256."""
    return "".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode()


def read_seal(content: bytes) -> dict[str, str]:
    """Return the sha256 of every listed file.

    Raises `BrokenSeal` for a line of another form, or for a name that is listed twice.
    """
    listed: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise BrokenSeal(f"{SEAL}, line {number} is not of the form '<sha256>  <name>'")
        if match["name"] in listed:
            raise BrokenSeal(f"{SEAL} lists {match['name']!r} twice")
        listed[match["name"]] = match["sha256"]
    return listed


def digest_of(seal: bytes) -> str:
    """Return the digest of a bundle: the sha256 of its seal."""
    return hashlib.sha256(seal).hexdigest()


def git_tree(files: Iterable[tuple[str, str, bool]]) -> str:
    """Return the id of the git tree with these files: name, blob id and executable bit of each.

    For an unchanged checkout without links and submodules, it is what `git rev-parse HEAD^{tree}` prints.
    """
    blobs: list[tuple[str, str, bool]] = []
    folders: dict[str, list[tuple[str, str, bool]]] = {}
    for name, blob, is_executable in files:
        first, _, rest = name.partition("/")
        if rest:
            folders.setdefault(first, []).append((rest, blob, is_executable))
        else:
            blobs.append((first, blob, is_executable))
    entries = [(name, b"100755" if is_executable else b"100644", blob) for name, blob, is_executable in blobs]
    entries += [(name, b"40000", git_tree(inner)) for name, inner in folders.items()]
    entries.sort(key=lambda entry: entry[0].encode() + (b"/" if entry[1] == b"40000" else b""))
    body = b"".join(mode + b" " + name.encode() + b"\0" + bytes.fromhex(blob) for name, mode, blob in entries)
    return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
