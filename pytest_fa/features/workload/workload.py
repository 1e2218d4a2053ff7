"""Reads a workload: cases, and how often each of them occurs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.select import parse_id
from pytest_fa.catalog.yaml_file import load_yaml
from pytest_fa.errors import ManifestError, UsageProblem, suggestion
from pytest_fa.features.workload.plugin import FLAG
from pytest_fa.options import values

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
KEY = "cases"
EXAMPLE = "b16h32s1d128-fp16-kv8-sk4096: 620"
LEAST_WEIGHT, MOST_WEIGHT = 1e-9, 1e9


class WeightedCase(NamedTuple):
    """A case, its id as it was written, and how often it occurs."""

    id: str
    case: Case
    weight: float


def read_workload(name: str, folder: Path) -> tuple[WeightedCase, ...]:
    """The cases of a shipped workload, or of a file, whose path is relative to `folder`.

    Raises `UsageProblem` with one line.
    """
    path = _path_of(name, folder)
    try:
        return _read(load_yaml(path))
    except ManifestError as problem:
        raise UsageProblem(f"{FLAG}: {problem}") from None
    except UsageProblem as problem:
        raise UsageProblem(f"{FLAG}: {path}: {problem}") from None


def _path_of(name: str, folder: Path) -> Path:
    path = SHIPPED.get(name) or values.folder(folder, name)
    if path is None or not os.path.exists(path):  # noqa: PTH110  # a name may be too long for a path
        known = f"shipped workloads: {', '.join(SHIPPED)}"
        raise UsageProblem(f"{FLAG}: there is no file {name!r}{suggestion(name, SHIPPED)} ({known})")
    return path


def _read(data: Any) -> tuple[WeightedCase, ...]:  # noqa: ANN401  # any YAML value
    """The cases of a file's data.  Raises `UsageProblem` without the name of the file."""
    keys = list(data) if isinstance(data, dict) else []
    if unknown := [key for key in keys if key != KEY]:
        raise UsageProblem(f"unknown key {unknown[0]!r}{suggestion(str(unknown[0]), [KEY])} (allowed: {KEY})")
    cases = data[KEY] if keys else None
    if not isinstance(cases, dict) or not cases:
        raise UsageProblem(f"it must list cases with their weights, such as `{KEY}: {{{EXAMPLE}}}`")
    mix: dict[str, WeightedCase] = {}
    for key, weight in cases.items():
        each = WeightedCase(str(key), parse_id(str(key)), _weight_of(str(key), weight))
        first = mix.setdefault(each.case.shape_id, each)
        if first is not each:
            raise UsageProblem(f"{first.id} and {each.id} are one shape, which is timed once; add up their weights")
    return tuple(mix.values())


def _weight_of(key: str, weight: Any) -> float:  # noqa: ANN401  # any YAML value
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        limits = f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        raise UsageProblem(f"the weight of {key} is {weight!r}; it must be a number above 0, from {limits}")
    return float(weight)
