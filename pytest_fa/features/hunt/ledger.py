"""The ledger: the known faults of kernels that others release, in `known.yaml` beside the manifests.

A fault that matches an entry is reported as known.  An entry whose example no longer fails ends the hunt as failed, so
that the ledger stays true.  Nothing else is excused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pytest_fa.catalog.variant import Device
from pytest_fa.catalog.yaml_file import load_yaml
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.features.hunt.example import Example, read_example
from pytest_fa.features.hunt.judged import NEVER_REPEATED
from pytest_fa.records.outcome import Outcome

LEDGER_NAME = "known.yaml"
Text = Annotated[str, msgspec.Meta(min_length=1)]


class KnownFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One known fault.

    `variant` is a name or a glob, and `example` the smallest example that fails with `outcome`.  `pattern` is a glob of
    all examples that may fail so; without one, it is `example` alone.  `versions` has the range of each package in
    which the fault is, such as `torch: ">=2.5,<2.12"`.  `reference` is the public report, or says that there is none.
    """

    variant: Text
    example: Text
    outcome: Outcome
    because: Text
    reference: Text
    pattern: str = ""
    versions: dict[str, str] = {}
    device: Device = "cuda"

    def applies(self, variant: str, device: Device) -> bool:
        """Whether the entry is about a variant, a device and the versions of this environment."""
        is_meant = fnmatchcase(variant, self.variant) and device == self.device
        return is_meant and all(_is_in(name, versions) for name, versions in self.versions.items())

    def excuses(self, example: Example, outcome: Outcome) -> bool:
        """Whether a failure is the known one."""
        return outcome == self.outcome and fnmatchcase(str(example), self.pattern or self.example)


class Ledger:
    """The entries about one variant on this machine."""

    def __init__(self, folders: Iterable[Path], variant: str, device: Device) -> None:
        entries = (entry for folder in folders for entry in read_ledger(folder / LEDGER_NAME))
        self._entries = tuple(entry for entry in entries if entry.applies(variant, device))

    @property
    def examples(self) -> tuple[Example, ...]:
        """An example of each known fault."""
        return tuple(read_example(entry.example) for entry in self._entries)

    def avoids(self, example: Example) -> bool:
        """Whether an example may end the process with a known fault, so that it is not launched."""
        return any(each.outcome in NEVER_REPEATED and each.excuses(example, each.outcome) for each in self._entries)

    def excuses(self, example: Example, outcome: Outcome) -> bool:
        """Whether a failure is a known one."""
        return any(each.excuses(example, outcome) for each in self._entries)

    def reference_of(self, example: Example, outcome: Outcome) -> str:
        """What is known about a failure, with its public report; empty if nothing is."""
        entry = next((each for each in self._entries if each.excuses(example, outcome)), None)
        return f"{entry.because} ({entry.reference})" if entry else ""

    def unexpected(self, right: Iterable[Example], unusable: Mapping[Example, str]) -> tuple[str, ...]:
        """A sentence for each entry whose example is right, or cannot be judged, with the reason."""
        right = set(right)
        of_unusable = tuple(f"{example} of {LEDGER_NAME} cannot be judged: {why}" for example, why in unusable.items())
        return of_unusable + tuple(
            f"{entry.example} no longer fails with {entry.outcome}: {entry.because}; drop it from {LEDGER_NAME}, or "
            f"give the versions that have it"
            for entry in self._entries
            if read_example(entry.example) in right
        )


def read_ledger(path: Path) -> tuple[KnownFault, ...]:
    """The entries of a file; none if it is absent.  Raises `UsageProblem` for a file that cannot be read."""
    if not path.exists():
        return ()
    try:
        entries = msgspec.convert(load_yaml(path) or [], tuple[KnownFault, ...])
        for entry in entries:
            _require_sensible(entry)
    except (ManifestError, msgspec.ValidationError, InvalidSpecifier, UsageProblem) as problem:
        text = str(problem).removeprefix("--fa-hunt-again: ").removeprefix(f"{path}: ")
        raise UsageProblem(f"{path}: {text}") from None
    return entries


def _require_sensible(entry: KnownFault) -> None:
    """Raise `UsageProblem` or `InvalidSpecifier` for an entry that can excuse nothing."""
    is_failure = entry.outcome.is_failure
    if not is_failure or not entry.excuses(read_example(entry.example), entry.outcome):
        what = "its pattern does not match it" if is_failure else f"{entry.outcome} is no failure"
        raise UsageProblem(f"the entry of {entry.example}: {what}")
    for versions in entry.versions.values():
        SpecifierSet(versions)


def _is_in(package: str, versions: str) -> bool:
    """Whether the installed version of a package is in a range, also a development version of it."""
    try:
        return SpecifierSet(versions).contains(version(package).partition("+")[0], prereleases=True)
    except PackageNotFoundError:
        return False
