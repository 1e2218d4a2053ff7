"""Read and check a manifest's `conventions`: how its kernel counts, where kernels differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention import parts
from pytest_fa.errors import suggestion

if TYPE_CHECKING:
    from pytest_fa.catalog.variant import Variant

Declared = dict[str, Any]  # what YAML has, which is read here


def read_conventions(declared: Mapping[str, Any]) -> dict[str, str]:
    """The declared values that are not plain.  Raises `ValueError` with what is allowed."""
    known, values = parts.conventions(), {}
    for key, value in declared.items():
        if key not in known:
            listed = f"{suggestion(key, tuple(known))} (allowed: {', '.join(known)})"
            raise ValueError(f"unknown key {key!r} in conventions{listed}")
        _, convention = known[key]
        text = _text(value)
        if text not in convention.values:
            raise ValueError(f"conventions.{key} is {value!r}; allowed are {', '.join(convention.values)}")
        if text != convention.plain:
            values[key] = text
    return values


def conventions_problem(variant: Variant) -> str | None:
    """Why a variant cannot declare one of its conventions, or None."""
    for key, value in variant.conventions.items():
        part, _ = parts.conventions()[key]
        if problem := part.convention_problem(key, variant):
            return f"{variant.name}: conventions.{key} is {value!r}, but {problem}"
    return None


def _text(value: object) -> str:
    """A value of YAML as conventions have it: `-.inf`, `false` and `null` are no texts there."""
    if isinstance(value, float) and math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
