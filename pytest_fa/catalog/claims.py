"""What a manifest's `supports` claims, the small cases that judge it, and what a run did not judge of it.

A suite tests lengths and head counts with the first dtype, head_dim and layout of a variant.  The cases of this module
add the rest: any two supported values of dtype, head_dim, mask, layout and grouping occur together in at least one of
the cases that are judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from pytest_fa.catalog.case import Case, Causal, Data, Dtype, Layout
from pytest_fa.catalog.variant import Variant

QUERIES = 150  # more than two tiles of 64, and not a multiple of a tile
FEWER = 77  # the other length under a bottom-right mask
HEADS, KV_HEADS = 4, 2
BATCH = 2
SPECIAL: tuple[Data, ...] = ("zero_head", "outlier", "tiny")
MASKS: dict[Causal, str] = {
    "none": "no mask",
    "top_left": "the top-left mask",
    "bottom_right": "the bottom-right mask",
}


class Claim(NamedTuple):
    """One combination of supported values."""

    dtype: Dtype
    head_dim: int
    causal: Causal
    layout: Layout
    is_grouped: bool

    @property
    def pairs(self) -> frozenset[tuple[tuple[int, object], ...]]:
        """Any two of the values, each with its place."""
        return frozenset(itertools.combinations(enumerate(self), 2))


def claim_of(case: Case) -> Claim:
    """The values of a case that a manifest supports or not."""
    return Claim(case.dtype, case.head_dim, case.causal, case.layout, case.kv_heads != case.heads)


def claims_of(variant: Variant, dtypes: tuple[str, ...] = ()) -> list[Claim]:
    """All combinations of values that a variant supports, fp16 first; with `dtypes`, those of these dtypes."""
    supports = variant.supports
    built = [
        (dtype, head_dim)
        for dtype, head_dim in variant.instantiations
        if dtype in supports.dtype and head_dim in supports.head_dim and (not dtypes or dtype in dtypes)
    ]
    masks = [mask for mask in MASKS if mask in supports.causal]
    layouts: list[Layout] = sorted(supports.layout)
    groupings = (False, True) if supports.grouped_heads else (False,)
    ordered = sorted(built, key=lambda pair: pair[0] != "fp16")
    combinations = itertools.product(ordered, masks, layouts, groupings)
    return [Claim(*pair, mask, layout, is_grouped) for pair, mask, layout, is_grouped in combinations]


def covering(claims: Iterable[Claim], judged: Iterable[Claim] = ()) -> list[Claim]:
    """A few of `claims` that have, together with `judged`, any two values that occur together in `claims`."""
    remaining = list(dict.fromkeys(claims))
    missing = {pair for claim in remaining for pair in claim.pairs} - {pair for claim in judged for pair in claim.pairs}
    chosen: list[Claim] = []
    while missing:
        best = max(remaining, key=lambda claim: len(claim.pairs & missing))
        chosen.append(best)
        missing -= best.pairs
    return chosen


def claim_cases(variant: Variant, judged: Iterable[Case], seed: int = 0, dtypes: tuple[str, ...] = ()) -> list[Case]:
    """The cases that judge, beside the cases `judged`, all that a candidate's manifest supports.

    The lengths are such that tiles are cut off.  Under a bottom-right mask there are in turn more keys than queries and
    fewer, so that some queries see no key.  A variant that supports `seq_k_min: 0` has a case without keys, and one
    that supports e4m3 has cases with heads of zeros, outliers and tiny descales.  Variants of other roles, and those
    with cases of their own, have none.
    """
    if variant.role != "candidate" or variant.cases:
        return []
    accepted = [case for case in judged if not variant.refuses(case)]
    chosen = covering(claims_of(variant, dtypes), map(claim_of, accepted))
    has_fewer_keys = itertools.cycle((False, True))
    cases = [
        case_of(variant, claim, seed, fewer_keys=claim.causal == "bottom_right" and next(has_fewer_keys))
        for claim in chosen
    ]
    has_keys = variant.supports.seq_k_min > 0 or any(case.seq_k == 0 for case in accepted)
    first = [] if has_keys else claims_of(variant, dtypes)[:1]
    special = _special_cases(variant, accepted, seed, dtypes)
    return [*cases, *(case_of(variant, claim, seed, keys=0) for claim in first), *special]


def case_of(
    variant: Variant, claim: Claim, seed: int = 0, *, fewer_keys: bool = False, keys: int | None = None
) -> Case:
    """A small case with the values of a claim; under a bottom-right mask, its two lengths differ."""
    is_shifted = claim.causal == "bottom_right"
    shorter = FEWER if is_shifted else QUERIES
    lengths = (QUERIES, shorter) if fewer_keys else (shorter, QUERIES)
    seq_q, seq_k = least_lengths(variant, *lengths)
    return Case(
        batch=BATCH,
        heads=HEADS,
        seq_q=seq_q,
        head_dim=claim.head_dim,
        dtype=claim.dtype,
        causal=claim.causal,
        kv_heads=KV_HEADS if claim.is_grouped else HEADS,
        seq_k=seq_k if keys is None else keys,
        layout=claim.layout,
        seed=seed,
        computes=variant.computes,
        fp8_out=variant.supports.fp8_out_of(claim.dtype),
    )


def _special_cases(variant: Variant, judged: list[Case], seed: int, dtypes: tuple[str, ...]) -> list[Case]:
    """For e4m3, a case with each kind of special heads that no case of `judged` has, in turn with each output dtype."""
    if "e4m3" not in variant.supports.dtype or (dtypes and "e4m3" not in dtypes):
        return []
    claims = [claim for claim in claims_of(variant) if claim.dtype == "e4m3"]
    missing = [kind for kind in SPECIAL if kind not in {case.data for case in judged}]
    kinds = zip(missing, itertools.cycle(reversed(variant.supports.fp8_out)), strict=False)
    plain = [case_of(variant, claims[0], seed)] if claims else []
    return [msgspec.structs.replace(case, data=kind, fp8_out=out) for kind, out in kinds for case in plain]


def least_lengths(variant: Variant, queries: int, keys: int | None = None) -> tuple[int, int]:
    """Return the smallest supported numbers of queries and of keys that are at least these."""
    supports = variant.supports
    least_keys = max(queries if keys is None else keys, supports.seq_k_min)
    return _round_up(queries, supports.seq_q_multiple_of), _round_up(least_keys, supports.seq_k_multiple_of)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# -- what was not judged ----------------------------------------------------------------------------------------------


class Unjudged(NamedTuple):
    """A value that a variant supports and that no case judged, in words, and its dtype if it has one."""

    text: str
    dtype: str | None = None


def unjudged(variant: Variant, judged: Iterable[Case]) -> list[Unjudged]:
    """What a candidate's manifest supports and no case of `judged` has: dtype and head_dim, masks, layouts, groups."""
    if variant.role != "candidate" or variant.cases:
        return []
    known, claims = {claim_of(case) for case in judged}, claims_of(variant)
    parts: tuple[tuple[Callable[[Claim], object], Callable[[Claim], Unjudged]], ...] = (
        (lambda claim: claim[:2], lambda claim: Unjudged(f"{claim.dtype} at D = {claim.head_dim}", claim.dtype)),
        (lambda claim: claim.causal, lambda claim: Unjudged(MASKS[claim.causal])),
        (lambda claim: claim.layout, lambda claim: Unjudged(f"layout {claim.layout}")),
        (lambda claim: claim.is_grouped, lambda claim: Unjudged(f"{'' if claim.is_grouped else 'un'}grouped heads")),
    )
    missing: dict[Unjudged, None] = {}
    for value_of, in_words in parts:
        values = {value_of(claim) for claim in known}
        missing.update(dict.fromkeys(in_words(claim) for claim in claims if value_of(claim) not in values))
    return list(missing)
