"""A suite's cases as a variant takes them: suites are about lengths, masks and heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant

Fits = tuple[Literal["dtype", "head_dim", "layout", "shape"], ...]
EVERYTHING: Fits = ("dtype", "head_dim", "layout", "shape")


def cases_for(variant: Variant, cases: tuple[Case, ...], fits: Fits) -> tuple[Case, ...]:
    """The cases as `variant` takes them, each once.

    Each asks for what the variant computes, unless it names something else itself.  A variant with shapes of its own
    gets those, with the seeds of `cases`, where `fits` has `shape`.
    """
    asked: Iterable[Case] = _own(variant, cases, fits) if variant.cases and "shape" in fits else cases
    named = (case if case.computes != "attention" else case.computing(variant.computes) for case in asked)
    return tuple(dict.fromkeys(fitted(variant, case, fits) for case in named))


def _own(variant: Variant, cases: tuple[Case, ...], fits: Fits) -> Iterable[Case]:
    """The variant's own shapes with every seed; in the dtypes of `cases` where those are not to be changed."""
    seeds = dict.fromkeys(case.seed for case in cases)
    dtypes = dict.fromkeys(case.dtype for case in cases)
    for shape in variant.cases:
        for each in (shape,) if "dtype" in fits else [shape.with_dtype(dtype) for dtype in dtypes]:
            yield from (each.with_seed(seed) for seed in seeds)


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
