"""A suite's case as a variant takes it: suites are about lengths, masks and heads."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant

Fits = tuple[Literal["dtype", "head_dim", "layout"], ...]
EVERYTHING: Fits = ("dtype", "head_dim", "layout")


def fitted(variant: Variant, case: Case, fits: Fits) -> Case:
    """The case with the first dtype, head_dim and layout that the variant takes, where it does not take the case's own.

    Only what `fits` names is changed; what cannot be fitted is left for the variant to refuse.
    """
    if "layout" in fits and case.layout not in variant.supports.layout:
        case = msgspec.structs.replace(case, layout=variant.supports.layout[0])
    pairs = [
        (dtype, head_dim)
        for dtype, head_dim in variant.instantiations
        if dtype in variant.supports.dtype and head_dim in variant.supports.head_dim
        if (dtype == case.dtype or "dtype" in fits) and (head_dim == case.head_dim or "head_dim" in fits)
    ]
    if not pairs:
        return case
    dtype, head_dim = min(pairs, key=lambda each: (each[0] != case.dtype, each[1] != case.head_dim))
    return msgspec.structs.replace(case, dtype=dtype, head_dim=head_dim)
