"""The installed packages against a constraints file."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import msgspec

from pytest_fa.errors import UsageProblem


class VersionDifference(msgspec.Struct, frozen=True):
    """One package that is not at the version the constraints name; `found` is None where it is missing."""

    package: str
    wanted: str
    found: str | None

    def __str__(self) -> str:
        return f"{self.package}: constraints say {self.wanted}, found {self.found or 'nothing'}"


def read_constraints(path: Path) -> dict[str, str]:
    """Package to version, from lines of the form `name==version`.  Raises `UsageProblem` for any other line."""
    pins = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        pin = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!-]+)", text)
        if pin is None:
            raise UsageProblem(f"{path}, line {number}: {text!r} is not of the form name==version")
        pins[pin[1]] = pin[2]
    return pins


def differences(constraints: dict[str, str]) -> list[VersionDifference]:
    """Every package whose installed version differs; a local part such as `+cpu` does not count."""
    found = []
    for package, wanted in constraints.items():
        installed = installed_version(package)
        if installed is None or installed.split("+")[0] != wanted.split("+")[0]:
            found.append(VersionDifference(package, wanted, installed))
    return found


def installed_version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
