"""What a manifest's `supports` claims, the small cases that judge it, and what a run did not judge of it.

A suite tests lengths and head counts with the first dtype, head_dim and layout of a variant.  The cases of this module
add the rest: any two supported values of dtype, head_dim, mask, layout and grouping occur together in at least one of
the cases that are judged, if a case can have both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.dtypes import Dtype
from pytest_fa.attention.e4m3 import SPECIAL
from pytest_fa.attention.part import Part, shown
from pytest_fa.attention.scores import Computes
from pytest_fa.attention.sizes import further_sizes, judged_sizes
from pytest_fa.catalog.case import Case, plain_case
from pytest_fa.catalog.factors import FIRST_PART, HEAD_DIM, Claim, Factors, claim_of, tells
from pytest_fa.catalog.variant import Supports, Variant

QUERIES = 150  # more than two tiles of 64, and not a multiple of a tile
FEWER = 77  # the other length under a bottom-right mask
HEADS = 4
BATCH = 2
# Queries and keys of the cases that judge lengths.  The keys leave 31, 1, 33, 1 and 63 after tiles of 64.
LENGTHS = ((1, 1055), (31, 129), (127, 161), (193, 65), (65, 63))
MANY_KEYS = 1024
LEAST_VISIBLE = 0.5  # of the pairs that the claim with most of them sees; a mask hides what a length shows


def claims_of(variant: Variant, dtypes: tuple[str, ...] = (), judged: Iterable[Case] = ()) -> list[Claim]:
    """A few combinations of values that a variant supports, the plainest first; with `dtypes`, those of these dtypes.

    Together with the cases `judged`, they have any two values that a case which the variant supports can have.  Of a
    range of sizes, a few have part in this, and each of a few others is that of one claim (`attention.sizes`).
    """
    factors, known = factors_of(variant, dtypes), [claim_of(case) for case in judged if tells(case)]
    return factors.covering(known) if known else factors.claims


def factors_of(variant: Variant, dtypes: tuple[str, ...] = ()) -> Factors:
    """What may differ between the cases that a variant supports, fp16 first; with `dtypes`, those of these dtypes."""
    return _factors(variant.supports, variant.instantiations, variant.computes, dtypes, tuple(parts.PARTS))


@functools.lru_cache(maxsize=256)  # many variants support the same
def _factors(
    supports: Supports,
    instantiations: tuple[tuple[Dtype, int], ...],
    computes: Computes,
    dtypes: tuple[str, ...],
    _: tuple[Part, ...],  # all there are, on which the answers depend
) -> Factors:
    built = [
        (dtype, head_dim)
        for dtype, head_dim in instantiations
        if dtype in supports.dtype and head_dim in supports.head_dim and (not dtypes or dtype in dtypes)
    ]
    sizes = tuple(dict.fromkeys(head_dim for _, head_dim in built))
    judged, claimed = judged_sizes(sizes), parts.claimed_parts()
    ordered = sorted((pair for pair in built if pair[1] in judged), key=lambda pair: pair[0] != "fp16")
    values = {part: part.judged_claims(supports, judged) for part in claimed}
    further: list[tuple[int, object]] = [(HEAD_DIM, size) for size in further_sizes(sizes)]
    further += [(n, each) for n, part in enumerate(claimed, FIRST_PART) for each in part.further_claims(supports)]
    plain = plain_case(BATCH, HEADS, QUERIES, 64, "fp16").computing(computes)
    return Factors(plain, ordered, values, further, supports)


def claim_problem(variant: Variant) -> str | None:
    """The first value that a manifest claims and that no case can have beside the others it claims, or None."""
    for place, part, value in _values_without_case(factors_of(variant)):
        if needed := _needed(variant, place, value):
            other, missing = needed
            listed = other.shown_claims(variant.supports)
            return (
                f"supports.{part.supports} has {shown(value)}, but a case with it needs {other.supports}: "
                f"{shown(missing)}, and supports.{other.supports} is {listed}; add {shown(missing)} to "
                f"supports.{other.supports}, or drop {shown(value)}"
            )
    return None


@functools.lru_cache(maxsize=256)  # as `_factors`
def _values_without_case(factors: Factors) -> list[tuple[int, Part, object]]:
    """The values of parts that no case can have beside the others, each with its place."""
    return [
        (place, part, value)
        for place, part in enumerate(parts.claimed_parts(), start=FIRST_PART)
        for value in factors.values[place]
        if factors.first_with(place, value) is None
    ]


def _needed(variant: Variant, place: int, value: object) -> tuple[Part, object] | None:
    """A value that a manifest must claim, too, so that a case can have the one at a place; None if none helps."""
    factors = factors_of(variant)
    known = {part: factors.values[number] for number, part in enumerate(parts.claimed_parts(), start=FIRST_PART)}
    every = {part: tuple(dict.fromkeys((*values, *part.claims))) for part, values in known.items()}
    claim = Factors(factors.plain, factors.dtypes_with_head_dims, every).first_with(place, value)
    added = ((part, each) for part, each in claim.by_part if each not in known[part]) if claim else ()
    return next(iter(added), None)


def claim_cases(variant: Variant, judged: Iterable[Case], seed: int = 0, dtypes: tuple[str, ...] = ()) -> list[Case]:
    """The cases that judge, beside the cases `judged`, all that a candidate's manifest supports.

    The lengths are such that tiles are cut off.  Under a bottom-right mask there are more keys than queries in one case
    and fewer in another, so that some queries see no key.  The cases of `LENGTHS` follow.  A variant that supports
    `seq_k_min: 0` has a case without keys, and one that supports e4m3 has cases with heads of zeros, outliers and tiny
    descales.  Variants of other roles, and those with cases of their own, have none.
    """
    if variant.role != "candidate" or variant.cases:
        return []
    accepted = [case for case in judged if not variant.refuses(case)]
    factors, supports = factors_of(variant, dtypes), variant.supports
    chosen = claims_of(variant, dtypes, accepted)
    cases = [case_of(variant, claim, seed) for claim in chosen if not claim.needs_two_lengths]
    cases += _cases_of_two_lengths(variant, chosen, claims_of(variant, dtypes), seed)
    has_keys = supports.seq_k_min > 0 or supports.self_attention_only or any(case.seq_k == 0 for case in accepted)
    first = None if has_keys else factors.first_with()
    special = _special_cases(variant, accepted, seed, dtypes)
    without_keys = [case_of(variant, first, seed, keys=0)] if first else []
    cases += length_cases(variant, seed, dtypes)
    of_parts = _cases_of_parts(variant, factors, [*accepted, *cases], seed)
    added = dict.fromkeys((*cases, *of_parts, *without_keys, *special))
    return [case for case in added if case not in accepted]


def _cases_of_parts(variant: Variant, factors: Factors, judged: list[Case], seed: int) -> list[Case]:
    """The cases of `Part.sized_in_turn` for what a variant claims, as far as it supports them.

    Of `Part.fields_in_turn`, there are cases of those that none of these and no case of `judged` has.
    """
    claims = {
        (part, value): claim
        for place, part in enumerate(parts.claimed_parts(), start=FIRST_PART)
        for value in factors.values[place]
        if (claim := factors.first_with(place, value))
    }
    cases = [
        _sized(variant, claim, *least_lengths(variant, seq_q, seq_k), seed).with_fields(fields)
        for (part, value), claim in claims.items()
        for seq_q, seq_k, fields in part.sized_in_turn(value)
    ]
    cases += [
        case_of(variant, claim, seed).with_fields(fields)
        for (part, value), claim in claims.items()
        for fields in part.fields_in_turn(value, HEADS)
        if not _is_judged(fields, (*judged, *cases))
    ]
    return [case for case in cases if variant.refuses(case) is None]


def _is_judged(fields: Mapping[str, Any], judged: Iterable[Case]) -> bool:
    """Whether a case has these values of fields."""
    return any(case.with_fields(fields) == case for case in judged)


def _cases_of_two_lengths(variant: Variant, chosen: list[Claim], claims: list[Claim], seed: int) -> list[Case]:
    """Cases of claims that need two lengths, in turn with more keys than queries and with fewer, at least one of each.

    They are those of `chosen`, or else the first of `claims`.
    """
    needing = [claim for claim in chosen if claim.needs_two_lengths]
    needing = needing or [claim for claim in claims if claim.needs_two_lengths][:1]
    in_turn = needing * 2 if len(needing) == 1 else needing
    return [case_of(variant, claim, seed, fewer_keys=bool(place % 2)) for place, claim in enumerate(in_turn)]


def length_cases(variant: Variant, seed: int = 0, dtypes: tuple[str, ...] = ()) -> list[Case]:
    """A case of each of `LENGTHS`, as far as the variant supports it, with what it claims in turn.

    A claim whose mask hides most keys of these lengths is left out.
    """
    factors, used, cases = factors_of(variant, dtypes), Counter[Any](), list[Case]()
    claims = list(dict.fromkeys((*map(factors.fuller, factors.claims), *factors.claims)))
    for lengths in LENGTHS:
        seq_q, seq_k = least_lengths(variant, *lengths)
        possible = {claim: _sized(variant, claim, seq_q, seq_k, seed, used) for claim in claims}
        most = max((case.visible_pairs for case in possible.values()), default=0)
        fitting = [claim for claim, case in possible.items() if case.visible_pairs >= LEAST_VISIBLE * most]
        if fitting:
            chosen = max(fitting, key=lambda claim: (-sum(used[value] for value in claim.placed), claim.special))
            used.update(chosen.placed)
            cases.append(possible[chosen])
    if claims and not any(map(sees_many_keys, cases)):  # as under a mask that hides all but the first keys
        square = least_lengths(variant, LENGTHS[0][1], LENGTHS[0][1])
        cases.append(_sized(variant, factors.claims[0], *square, seed))
    return cases


def sees_many_keys(case: Case) -> bool:
    """Whether the last query sees more than `MANY_KEYS` keys."""
    return case.visible_keys(case.seq_q - 1) > MANY_KEYS


def case_of(
    variant: Variant, claim: Claim, seed: int = 0, *, fewer_keys: bool = False, keys: int | None = None
) -> Case:
    """A small case with the values of a claim; if it needs two lengths, they differ."""
    shorter = FEWER if claim.needs_two_lengths else QUERIES
    lengths = (QUERIES, shorter) if fewer_keys else (shorter, QUERIES)
    seq_q, seq_k = least_lengths(variant, *lengths)
    return _sized(variant, claim, seq_q, seq_k if keys is None else keys, seed)


def _sized(variant: Variant, claim: Claim, seq_q: int, seq_k: int, seed: int, used: Counter[Any] | None = None) -> Case:
    """A case of these lengths with the values of a claim."""
    seq_q, seq_k = claim.lengths(seq_q, seq_k)
    plain = plain_case(BATCH, HEADS, seq_q, claim.head_dim, claim.dtype, seed, seq_k=seq_k)
    case = claim.applied_to(plain.computing(variant.computes), used).with_fields(
        {"fp8_out": variant.supports.fp8_out_of(claim.dtype)}
    )
    # Fields in turn may have what the variant does not support, such as another scale.
    return case if used is None or variant.refuses(case) is None else _sized(variant, claim, seq_q, seq_k, seed)


def _special_cases(variant: Variant, judged: list[Case], seed: int, dtypes: tuple[str, ...]) -> list[Case]:
    """For e4m3, a case with each kind of special heads that no case of `judged` has, in turn with each output dtype."""
    if "e4m3" not in variant.supports.dtype or (dtypes and "e4m3" not in dtypes):
        return []
    claim = factors_of(variant, ("e4m3",)).first_with()
    missing = [kind for kind in SPECIAL if kind not in {case.data for case in judged}]
    kinds = zip(missing, itertools.cycle(reversed(variant.supports.fp8_out)), strict=False)
    plain = [case_of(variant, claim, seed)] if claim else []
    return [msgspec.structs.replace(case, data=kind, fp8_out=out) for kind, out in kinds for case in plain]


def least_lengths(variant: Variant, queries: int, keys: int | None = None) -> tuple[int, int]:
    """Return the smallest supported numbers of queries and of keys that are at least these.

    Where they must be equal, both are the number of keys.
    """
    supports = variant.supports
    least_keys = max(queries if keys is None else keys, supports.seq_k_min)
    if supports.self_attention_only:
        both = _round_up(least_keys, math.lcm(supports.seq_q_multiple_of, supports.seq_k_multiple_of))
        return both, both
    return _round_up(queries, supports.seq_q_multiple_of), _round_up(least_keys, supports.seq_k_multiple_of)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# -- what was not judged ----------------------------------------------------------------------------------------------


class Unjudged(NamedTuple):
    """A value that a variant supports and that no case judged, in words, and its dtype if it has one."""

    text: str
    dtype: str | None = None


def unjudged(variant: Variant, judged: Iterable[Case]) -> list[Unjudged]:
    """What a candidate's manifest supports and no case of `judged` has, also kinds of lengths."""
    if variant.role != "candidate" or variant.cases:
        return []
    judged = list(judged)
    known, factors = [claim_of(case) for case in judged], factors_of(variant)
    sizes, built = {claim.head_dim for claim in known}, {claim[:2] for claim in known}
    missing = [
        Unjudged(f"{dtype} at D = {head_dim}", dtype)
        for dtype, head_dim in factors.dtypes_with_head_dims
        if (dtype, head_dim) not in built and (HEAD_DIM, head_dim) not in factors.once
    ]
    missing += [
        Unjudged(f"D = {size}")
        for size in factors.values[HEAD_DIM]
        if size not in sizes and (HEAD_DIM, size) in factors.once
    ]
    for place, part in enumerate(parts.claimed_parts(), start=FIRST_PART):
        values = {claim.flat[place] for claim in known}
        missing += [Unjudged(part.claim_words(value)) for value in factors.values[place] if value not in values]
    return [*dict.fromkeys(missing), *map(Unjudged, _unjudged_lengths(variant, judged))]


def _unjudged_lengths(variant: Variant, judged: list[Case]) -> Iterator[str]:
    """The kinds of lengths that a variant supports and no case of `judged` has, in words."""
    supports = variant.supports
    kinds: dict[str, Callable[[Case], bool]] = {
        "one query": lambda case: case.seq_q == 1,
        "fewer queries than keys": lambda case: case.seq_q < case.seq_k,
        "more queries than keys": lambda case: case.seq_q > case.seq_k,
        "more than 1,024 keys": sees_many_keys,
    }
    if supports.self_attention_only:
        kinds = {"more than 1,024 keys": sees_many_keys}
    if supports.seq_q_multiple_of > 1:
        kinds.pop("one query", None)
    yield from (words for words, is_one in kinds.items() if not any(map(is_one, judged)))
