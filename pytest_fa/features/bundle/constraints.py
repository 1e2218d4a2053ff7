"""Compare the installed packages with a constraints file."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import msgspec

from pytest_fa.errors import UsageProblem


class VersionDifference(msgspec.Struct, frozen=True):
    """One package whose version differs from the constraints; `installed` is None if the package is not installed."""

    package: str
    wanted: str
    installed: str | None

    def __str__(self) -> str:
        return f"{self.package}: installed is {self.installed or 'no version'}, constraints pin {self.wanted}"


def read_constraints(path: Path) -> dict[str, str]:
    """Return the pinned version of each package.

    Lines have the form `name==version`.  Raises `UsageProblem` for any other line.
    """
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
    """Return each package whose installed version differs; local parts such as `+cpu` are not compared."""
    changed = []
    for package, wanted in constraints.items():
        installed = installed_version(package)
        if installed is None or installed.split("+")[0] != wanted.split("+")[0]:
            changed.append(VersionDifference(package, wanted, installed))
    return changed


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
