"""What a manifest's `supports` claims, the small cases that judge it, and what a run did not judge of it.

A suite tests lengths and head counts with the first dtype, head_dim and layout of a variant.  The cases of this module
add the rest: any two supported values of dtype, head_dim, mask, layout and grouping occur together in at least one of
the cases that are judged.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.dtypes import Dtype
from pytest_fa.attention.e4m3 import SPECIAL
from pytest_fa.attention.part import Part
from pytest_fa.catalog.case import Case, plain_case
from pytest_fa.catalog.variant import Variant

QUERIES = 150  # more than two tiles of 64, and not a multiple of a tile
FEWER = 77  # the other length under a bottom-right mask
HEADS = 4
BATCH = 2
# Queries and keys of the cases that judge lengths.  The keys leave 31, 1, 33, 1 and 63 after tiles of 64.
LENGTHS = ((1, 1055), (31, 129), (127, 161), (193, 65), (65, 63))
MANY_KEYS = 1024
LEAST_VISIBLE = 0.5  # of the pairs that the claim with most of them sees; a mask hides what a length shows


class Claim(NamedTuple):
    """One combination of supported values; `values` are those of `parts.claimed_parts()`."""

    dtype: Dtype
    head_dim: int
    values: tuple[object, ...]

    @property
    def flat(self) -> tuple[object, ...]:
        """All values."""
        return (self.dtype, self.head_dim, *self.values)

    @property
    def pairs(self) -> frozenset[tuple[tuple[int, object], ...]]:
        """Any two of the values, each with its place."""
        return frozenset(itertools.combinations(self.placed, 2))

    @property
    def placed(self) -> tuple[tuple[int, object], ...]:
        """The values, each with its place."""
        return tuple(enumerate(self.flat))

    @property
    def special(self) -> int:
        """How many parts have another value than a plain case."""
        return sum(value != part.claims[0] for part, value in self._by_part())

    @property
    def needs_two_lengths(self) -> bool:
        """Whether it shows only in a case whose numbers of queries and keys differ."""
        return any(part.needs_two_lengths(value) for part, value in self._by_part())

    def applied_to(self, case: Case, turn: int | None = None) -> Case:
        """The case with these values, and as many heads as they need; `turn` chooses one of `Part.fields_in_turn`."""
        case = case.with_dtype(self.dtype)
        for part, value in self._by_part():
            if turn is None:
                fields = part.fields_with(value, case.heads)
            else:
                in_turn = part.fields_in_turn(value, case.heads)
                fields = in_turn[turn % len(in_turn)]
            case = case.with_fields(fields)
        return case.with_fields({"head_dim": self.head_dim})

    def _by_part(self) -> Iterable[tuple[Part, object]]:
        return zip(parts.claimed_parts(), self.values, strict=True)


def claim_of(case: Case) -> Claim:
    """The values of a case that a manifest supports or not."""
    return Claim(case.dtype, case.head_dim, tuple(part.claimed_by(case) for part in parts.claimed_parts()))


def claims_of(variant: Variant, dtypes: tuple[str, ...] = ()) -> list[Claim]:
    """All combinations of values that a variant supports, fp16 first; with `dtypes`, those of these dtypes."""
    supports = variant.supports
    built = [
        (dtype, head_dim)
        for dtype, head_dim in variant.instantiations
        if dtype in supports.dtype and head_dim in supports.head_dim and (not dtypes or dtype in dtypes)
    ]
    ordered = sorted(built, key=lambda pair: pair[0] != "fp16")
    supported = ((part, part.supported(supports)) for part in parts.claimed_parts())
    values = itertools.product(*([claim for claim in part.claims if claim in claims] for part, claims in supported))
    return [Claim(*pair, combination) for pair, combination in itertools.product(ordered, list(values))]


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

    The lengths are such that tiles are cut off.  Under a bottom-right mask there are more keys than queries in one case
    and fewer in another, so that some queries see no key.  The cases of `LENGTHS` follow.  A variant that supports
    `seq_k_min: 0` has a case without keys, and one that supports e4m3 has cases with heads of zeros, outliers and tiny
    descales.  Variants of other roles, and those with cases of their own, have none.
    """
    if variant.role != "candidate" or variant.cases:
        return []
    accepted = [case for case in judged if not variant.refuses(case)]
    claims, supports = claims_of(variant, dtypes), variant.supports
    chosen = covering(claims, map(claim_of, accepted))
    cases = [case_of(variant, claim, seed) for claim in chosen if not claim.needs_two_lengths]
    cases += _cases_of_two_lengths(variant, chosen, claims, seed)
    has_keys = supports.seq_k_min > 0 or supports.self_attention_only or any(case.seq_k == 0 for case in accepted)
    first = [] if has_keys else claims[:1]
    special = _special_cases(variant, accepted, seed, dtypes)
    without_keys = (case_of(variant, claim, seed, keys=0) for claim in first)
    of_parts = _cases_of_parts(variant, claims, seed)
    added = dict.fromkeys((*cases, *length_cases(variant, seed, dtypes), *of_parts, *without_keys, *special))
    return [case for case in added if case not in accepted]


def _cases_of_parts(variant: Variant, claims: list[Claim], seed: int) -> Iterator[Case]:
    """The cases of `Part.sized_in_turn` for what a variant claims, as far as it supports their lengths."""
    for place, part in enumerate(parts.claimed_parts()):
        for value in part.supported(variant.supports):
            for claim in [claim for claim in claims if claim.values[place] == value][:1]:
                for seq_q, seq_k, fields in part.sized_in_turn(value):
                    case = _sized(variant, claim, *least_lengths(variant, seq_q, seq_k), seed).with_fields(fields)
                    if variant.refuses(case) is None:
                        yield case


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
    claims, used, cases = claims_of(variant, dtypes), Counter[object](), list[Case]()
    for turn, lengths in enumerate(LENGTHS):
        seq_q, seq_k = least_lengths(variant, *lengths)
        possible = {claim: _sized(variant, claim, seq_q, seq_k, seed, turn // 2) for claim in claims}
        most = max((case.visible_pairs for case in possible.values()), default=0)
        fitting = [claim for claim, case in possible.items() if case.visible_pairs >= LEAST_VISIBLE * most]
        if fitting:
            chosen = max(fitting, key=lambda claim: (-sum(used[value] for value in claim.placed), claim.special))
            used.update(chosen.placed)
            cases.append(possible[chosen])
    if claims and not any(map(sees_many_keys, cases)):  # as under a mask that hides all but the first keys
        square = least_lengths(variant, LENGTHS[0][1], LENGTHS[0][1])
        cases.append(_sized(variant, claims[0], *square, seed))
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


def _sized(variant: Variant, claim: Claim, seq_q: int, seq_k: int, seed: int, turn: int | None = None) -> Case:
    """A case of these lengths with the values of a claim."""
    plain = plain_case(BATCH, HEADS, seq_q, claim.head_dim, claim.dtype, seed, seq_k=seq_k)
    return claim.applied_to(plain.computing(variant.computes), turn).with_fields(
        {"fp8_out": variant.supports.fp8_out_of(claim.dtype)}
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
    known, claims = {claim_of(case) for case in judged}, claims_of(variant)
    kinds: list[tuple[Callable[[Claim], object], Callable[[Claim], Unjudged]]] = [
        (lambda claim: claim[:2], lambda claim: Unjudged(f"{claim.dtype} at D = {claim.head_dim}", claim.dtype)),
        *(_kind_of(place, part) for place, part in enumerate(parts.claimed_parts())),
    ]
    missing: dict[Unjudged, None] = {}
    for value_of, in_words in kinds:
        values = {value_of(claim) for claim in known}
        missing.update(dict.fromkeys(in_words(claim) for claim in claims if value_of(claim) not in values))
    return [*missing, *map(Unjudged, _unjudged_lengths(variant, judged))]


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


def _kind_of(place: int, part: Part) -> tuple[Callable[[Claim], object], Callable[[Claim], Unjudged]]:
    """How to read the value of a part in a claim, and to name it."""
    return lambda claim: claim.values[place], lambda claim: Unjudged(part.claim_words(claim.values[place]))
