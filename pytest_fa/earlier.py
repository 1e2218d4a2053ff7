"""Names of earlier versions that are still taken.  Each is read as the new name, and one line says what that is.

`records.earlier` has those of records.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MANIFEST_KEYS = {"leaves_out": "omits", "explained": "suppressions"}
ROLES = {"floor": "overhead"}
POLICIES = {"measured": "same_precision"}
BLOCKS = {"stages": "phases", "verdicts": "bottlenecks"}  # of Markdown files: fa-stages is now fa-phases
TRUTH_ATTRIBUTES = {"yardstick": "same_precision"}


def renamed(old: str, new: str) -> str:
    """The one line that names the new name."""
    return f"{old!r} is now called {new!r}"


def upgrade_manifest(data: Any, say: Callable[[str], object]) -> Any:  # noqa: ANN401  # whatever the file holds
    """A manifest's content in today's names; `say` is told each old name that was found, once."""
    if not isinstance(data, dict):
        return data
    members = data.get("variants")
    told = dict.fromkeys(_upgrade_keys(data))
    for member in members.values() if isinstance(members, dict) else ():
        told.update(dict.fromkeys(_upgrade_keys(member) if isinstance(member, dict) else ()))
    for line in told:
        say(line)
    return data


def _upgrade_keys(data: dict[Any, Any]) -> Iterator[str]:
    """Rename keys and values of one mapping in place; gives a line for each.  A new key that is there too stays."""
    for old, new in MANIFEST_KEYS.items():
        if old in data and new not in data:
            data[new] = data.pop(old)
            yield renamed(old, new)
    for key, words in (("role", ROLES), ("tolerance", POLICIES)):
        value = data.get(key)
        if isinstance(value, str) and value in words:
            data[key] = words[value]
            yield f"{key}: {renamed(value, words[value])}"


def also_called(names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """A class decorator: each old attribute gives the new one, with a `DeprecationWarning` that names it."""

    def decorate(owner: type[T]) -> type[T]:
        for old, new in names.items():
            setattr(owner, old, _old_attribute(owner.__name__, old, new))
        return owner

    return decorate


def _old_attribute(owner: str, old: str, new: str) -> property:
    def read(value: object) -> Any:  # noqa: ANN401  # whatever the attribute holds
        warnings.warn(f"{owner}.{old} is now called {owner}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(value, new)

    return property(read)
