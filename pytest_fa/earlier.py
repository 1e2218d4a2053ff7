"""Old names that are still accepted in manifests, Markdown files and attributes.

Each old name is read as the new one, and one line of output names the new one.  `records.earlier` has the old names of
record fields.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MANIFEST_KEYS = {"leaves_out": "omits", "explained": "suppressions"}
ROLES = {"floor": "overhead"}
POLICIES = {"measured": "same_precision"}
BLOCKS = {"stages": "phases", "verdicts": "bottlenecks"}  # table blocks in Markdown files: fa-stages is now fa-phases
JOB_KEYS = {**MANIFEST_KEYS, "witnesses": "cross_checks", "contests": "arm_pairs"}
JOB_TYPES = {"busy": "profiler"}
TRUTH_ATTRIBUTES = {"yardstick": "same_precision"}


def renamed(old: str, new: str) -> str:
    """Return the line that gives the new name of an old one."""
    return f"{old!r} is now called {new!r}"


def upgrade_manifest(data: Any, say: Callable[[str], object]) -> Any:  # noqa: ANN401  # any YAML value
    """Rename old keys and values of a manifest in place, and return it.

    `say` is called once for each old name, with a line that gives the new one.
    """
    if not isinstance(data, dict):
        return data
    members = data.get("variants")
    notices = dict.fromkeys(_upgrade_keys(data))
    for member in members.values() if isinstance(members, dict) else ():
        notices.update(dict.fromkeys(_upgrade_keys(member) if isinstance(member, dict) else ()))
    for line in notices:
        say(line)
    return data


def _upgrade_keys(data: dict[Any, Any]) -> Iterator[str]:
    """Rename old keys and values of one mapping in place, and yield a line for each.

    If a mapping has both the old key and the new one, neither is changed.
    """
    for old, new in MANIFEST_KEYS.items():
        if old in data and new not in data:
            data[new] = data.pop(old)
            yield renamed(old, new)
    for key, new_values in (("role", ROLES), ("tolerance", POLICIES)):
        value = data.get(key)
        if isinstance(value, str) and value in new_values:
            data[key] = new_values[value]
            yield f"{key}: {renamed(value, new_values[value])}"


def upgrade_job(data: Any) -> Any:  # noqa: ANN401  # any JSON value
    """Return the content of a job file with the current names of keys, policies and roles."""
    if isinstance(data, list):
        return [upgrade_job(item) for item in data]
    if not isinstance(data, dict):
        return data
    upgraded = {JOB_KEYS.get(key, key): upgrade_job(value) for key, value in data.items()}
    for key, new_values in (("policy", POLICIES), ("tolerance", POLICIES), ("role", ROLES), ("type", JOB_TYPES)):
        if isinstance(value := upgraded.get(key), str):
            upgraded[key] = new_values.get(value, value)
    return upgraded


def with_old_attributes(names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds old attribute names, given as a map from old to new.

    An old attribute returns the new one's value, with a `DeprecationWarning` that gives the new name.
    """

    def decorate(owner: type[T]) -> type[T]:
        for old, new in names.items():
            setattr(owner, old, _old_attribute(owner.__name__, old, new))
        return owner

    return decorate


def _old_attribute(owner: str, old: str, new: str) -> property:
    def read(value: object) -> Any:  # noqa: ANN401  # the type of the new attribute
        warnings.warn(f"{owner}.{old} is now called {owner}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(value, new)

    return property(read)
