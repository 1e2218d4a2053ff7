"""Which parameters of a test run for every change, and which ones only in the nightly run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


def nightly_but(names: Iterable[str], *kept: str) -> list[ParameterSet]:
    """Each name as a parameter; all are marked `nightly` but those in `kept`, which must be among the names."""
    known = list(names)
    unknown = set(kept) - set(known)
    assert not unknown, f"no parameters of this test: {sorted(unknown)}"
    return [pytest.param(name, marks=[] if name in kept else [pytest.mark.nightly]) for name in known]


def nightly_after(kept: int, rows: Iterable[Any], *, is_one_name: bool = False) -> list[Any]:
    """The rows of a test's parameters, each a value or a tuple; those after the first `kept` are marked `nightly`.

    With `is_one_name`, a tuple is the value of one parameter.
    """
    listed = list(rows)
    late = (row if isinstance(row, tuple) and not is_one_name else (row,) for row in listed[kept:])
    return [*listed[:kept], *(pytest.param(*row, marks=[pytest.mark.nightly]) for row in late)]
