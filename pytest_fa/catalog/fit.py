"""Adapt the cases of a suite to a variant: change the dtype, head_dim or layout that it does not support.

Suites test lengths, masks and head counts, so these other parameters may change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from pytest_fa.attention import parts
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant

Fits = tuple[Literal["dtype", "head_dim", "layout", "shape"], ...]
EVERYTHING: Fits = ("dtype", "head_dim", "layout", "shape")


def cases_for(variant: Variant, cases: tuple[Case, ...], fits: Fits) -> tuple[Case, ...]:
    """Return `cases` adapted to `variant`, without duplicates.

    A case of attention is changed to what the variant computes; a case whose id has `-scores` is not.  If `fits` has
    `shape` and the variant has its own shapes, these are used with the seeds of `cases`.
    """
    uses_own_shapes = bool(variant.cases) and "shape" in fits
    shapes: Iterable[Case] = _own_shapes(variant, cases, fits) if uses_own_shapes else cases
    computed = (case if case.computes != "attention" else case.computing(variant.computes) for case in shapes)
    return tuple(dict.fromkeys(fitted(variant, case, fits) for case in computed))


def _own_shapes(variant: Variant, cases: tuple[Case, ...], fits: Fits) -> Iterable[Case]:
    """Yield the variant's own shapes with each seed of `cases`, and, if `fits` has no `dtype`, with each dtype."""
    seeds = dict.fromkeys(case.seed for case in cases)
    dtypes = dict.fromkeys(case.dtype for case in cases)
    for shape in variant.cases:
        for typed in (shape,) if "dtype" in fits else [shape.with_dtype(dtype) for dtype in dtypes]:
            yield from (typed.with_seed(seed) for seed in seeds)


def fitted(variant: Variant, case: Case, fits: Fits) -> Case:
    """Return `case` with its dtype, head_dim and layout replaced where the variant does not support them.

    The replacement is the first supported value, for e4m3 also of the output's dtype.  Only the parameters in `fits`
    change.  A case that still does not fit is refused later, by `Variant.refuses`.
    """
    for part in parts.claimed_parts():
        supported = part.supported(variant.supports)
        if part.name in fits and part.claimed_by(case) not in supported:
            case = case.with_fields(part.fields_with(supported[0], case.heads))
    pairs = [
        (dtype, head_dim)
        for dtype, head_dim in variant.instantiations
        if dtype in variant.supports.dtype and head_dim in variant.supports.head_dim
        if (dtype == case.dtype or "dtype" in fits) and (head_dim == case.head_dim or "head_dim" in fits)
    ]
    if variant.supports.any_head_dim:
        pairs += [(dtype, case.head_dim) for dtype, _ in pairs]
    if not pairs:
        return case
    dtype, head_dim = min(pairs, key=lambda pair: (pair[0] != case.dtype, pair[1] != case.head_dim))
    case = case.with_fields({"head_dim": head_dim}).with_dtype(dtype)
    if dtype == "e4m3" and "dtype" in fits and case.fp8_out not in variant.supports.fp8_out:
        case = msgspec.structs.replace(case, fp8_out=variant.supports.fp8_out[0])
    return case
