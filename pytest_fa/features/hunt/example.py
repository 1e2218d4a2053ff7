"""An example: one random case, whose output is judged, or a property that is tested on it."""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.attention.data import FIELD as PROFILE
from pytest_fa.attention.data import NORMAL
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.properties import PROPERTIES, fits_cache
from pytest_fa.catalog.select import parse_id
from pytest_fa.errors import UsageProblem, suggestion

# The properties that can be tested on any case.  Others need one of a certain form, or take long.
HUNTED_PROPERTIES = (
    "padded_rows",
    "unaligned_rows",
    "different_strides",
    "expanded_heads",
    "expanded_batch",
    "offset_pointers",
    "head_independence",
    "contained_nan",
    "new_data",
    "negative_scale",
    "batch_invariance",
    "position_invariance",
)
NEED_TWO_HEADS = ("head_independence", "contained_nan")  # of K and V


class Example(NamedTuple):
    """A case, and the property that is tested on it; without one, its output is judged."""

    case: Case
    property_name: str = ""

    def __str__(self) -> str:
        return f"{self.property_name}:{self.case.id}" if self.property_name else self.case.id


def can_test(name: str, case: Case) -> bool:
    """Whether a property can be tested on a case; each makes data of its own from N(0, 1)."""
    if (name and case.value_of(PROFILE) != NORMAL) or (name == "contained_nan" and case.seq_k == 0):
        return False
    return (name not in NEED_TWO_HEADS or case.kv_heads > 1) and fits_cache(name, case.value_of("cache_dtype"))


def read_example(text: str) -> Example:
    """The example of a text, `CASE` or `PROPERTY:CASE`.  Raises `UsageProblem`."""
    name, _, case = text.rpartition(":")
    if name and name not in PROPERTIES:
        known = suggestion(name, PROPERTIES)
        raise UsageProblem(f"--fa-hunt-again: no property {name!r}{known}; the form is CASE or PROPERTY:CASE")
    return Example(parse_id(case), name)
