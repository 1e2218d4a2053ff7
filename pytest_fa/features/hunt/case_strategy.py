"""Random examples of what a manifest claims, as a strategy of Hypothesis.

The first value of each choice is the plainest one, because Hypothesis shrinks towards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.part import Part
from pytest_fa.catalog.case import Case, plain_case, problem_of
from pytest_fa.catalog.claims import factors_of, least_lengths
from pytest_fa.catalog.properties import applies, declared_against
from pytest_fa.catalog.variant import Device, Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.hunt.example import HUNTED_PROPERTIES, Example, can_test
from pytest_fa.features.hunt.optional_hypothesis import st

MAX_PARTS = 4  # of attention that are not plain in one case
MAX_BATCHES, MAX_HEADS = 4, 6
TILE, MAX_TILES = 64, 8
LONG = 1100
MAX_SEED = 2**16
MAX_PRODUCTS: dict[Device, int] = {"cpu": 2**23, "cuda": 2**28}  # multiplications of Q K^T in one case
ONE_IN = 4  # examples, on which a property is tested; the output of the others is judged

Draw = Callable[["st.SearchStrategy[Any]"], Any]


class PartChange(NamedTuple):
    """One part that is not plain in a case: its place among the varied parts, its value, and the fields for that."""

    place: int
    part: Part
    claim: object
    fields: Mapping[str, Any]


def examples_of(variant: Variant, device: Device, dtypes: tuple[str, ...] = ()) -> st.SearchStrategy[Example]:
    """Random examples that a variant claims to support, small enough for many a second; with `dtypes`, of these.

    Raises `UsageProblem` for a variant that supports no case of these dtypes.
    """
    require_hunted(variant, dtypes)
    first = factors_of(variant, dtypes).first_with()
    assert first  # noqa: S101  # a variant without cases is not hunted
    built = [pair for pair in variant.instantiations if not dtypes or pair[0] in dtypes]
    pairs = sorted(built, key=lambda pair: (pair[0] != first.dtype, pair[1] != first.head_dim, pair[1]))
    varied = [part for part in parts.PARTS if len(part.hunted_claims(variant.supports)) > 1]
    names = [
        name for name in HUNTED_PROPERTIES if applies(name, variant, device) and not declared_against(name, variant)
    ]
    changes, queries, keys = _changes(variant, varied), _lengths(1), st.none() | _lengths(variant.supports.seq_k_min)

    @st.composite
    def examples(draw: Draw) -> Example:
        dtype, head_dim = draw(st.sampled_from(pairs))
        seq_q, seq_k = draw(queries), draw(keys)
        batch, heads = draw(st.integers(1, MAX_BATCHES)), draw(st.integers(1, MAX_HEADS))
        seed = draw(st.integers(0, MAX_SEED))
        lengths = least_lengths(variant, seq_q, max(seq_q, variant.supports.seq_k_min) if seq_k is None else seq_k)
        plain = plain_case(batch, heads, lengths[0], head_dim, dtype, seed, seq_k=lengths[1]).computing(
            variant.computes
        )
        case = first._replace(dtype=dtype, head_dim=head_dim).applied_to(plain)
        case = case.with_fields({"fp8_out": variant.supports.fp8_out_of(dtype)})
        for change in sorted(draw(changes(heads)), key=_place_of):
            case = _with_part(case, change, varied, variant)
        case = _within(case, variant, MAX_PRODUCTS[device])
        name = draw(st.sampled_from(names)) if names and draw(st.integers(0, ONE_IN - 1)) == ONE_IN - 1 else ""
        return Example(case, name if can_test(name, case) else "")

    def is_right(example: Example) -> bool:
        return is_usable(example.case, variant)

    return examples().filter(is_right)


def why_not_hunted(variant: Variant, dtypes: tuple[str, ...] = ()) -> str:
    """Why a variant has no random cases, or none of these dtypes; empty if it has."""
    if variant.cases:
        return "its manifest has cases of its own"
    return "" if factors_of(variant, dtypes).first_with() else f"it supports no case in {' or '.join(dtypes)}"


def require_hunted(variant: Variant, dtypes: tuple[str, ...] = ()) -> None:
    """Raise `UsageProblem` for a variant that has no random cases."""
    if why := why_not_hunted(variant, dtypes):
        raise UsageProblem(f"--fa-hunt: {variant.name} cannot be hunted: {why}; hunt another variant")


def is_usable(case: Case, variant: Variant) -> bool:
    """Whether a case is possible and the variant claims to support it."""
    return problem_of(case) is None and variant.refuses(case) is None


def _lengths(least: int) -> st.SearchStrategy[int]:
    """Numbers of queries or keys: few, some, near the ends of tiles, and many."""
    near_ends = st.builds(_near_end, st.integers(1, MAX_TILES), st.integers(-2, 2))
    return st.integers(least, 16) | st.integers(least, 3 * TILE) | near_ends | st.integers(max(1, least), LONG)


def _near_end(tiles: int, more: int) -> int:
    return tiles * TILE + more


def _changes(variant: Variant, varied: list[Part]) -> Callable[[int], st.SearchStrategy[list[PartChange]]]:
    """A function of the number of heads: a few parts with values that are not plain.

    Each is drawn whole, so that shrinking can leave it out.
    """

    @st.composite
    def change(draw: Draw, heads: int) -> PartChange:
        place = draw(st.integers(0, len(varied) - 1))
        part = varied[place]
        claim = draw(st.sampled_from(part.hunted_claims(variant.supports)[1:]))
        fields = part.random_fields(claim, heads, lambda low, high: draw(st.integers(low, high)))
        return PartChange(place, part, claim, fields)

    most = MAX_PARTS if varied else 0
    return lambda heads: st.lists(change(heads), unique_by=_place_of, max_size=most)


def _place_of(change: PartChange) -> int:
    return change.place


def _with_part(case: Case, change: PartChange, varied: list[Part], variant: Variant) -> Case:
    """The case with another value of a part, and of one more part if that needs it; unchanged if none helps."""
    _, part, claim, fields = change
    further = (
        other.fields_with(value, case.heads)
        for other in varied
        if other is not part and other.supports and other.claimed_by(case) == other.claims[0]
        for value in other.hunted_claims(variant.supports)[1:]
    )
    for more in ({}, *further):
        changed = case.with_fields({**more, **fields})
        if part.needs_one_length(claim):
            both = max(changed.seq_q, changed.seq_k)
            changed = msgspec.structs.replace(changed, seq_q=both, seq_k=both)
        if is_usable(changed, variant):
            return changed
    return case


def _within(case: Case, variant: Variant, most: int) -> Case:
    """The case with fewer batches, heads or tokens, so that it has at most so many products, as far as possible."""
    group = case.heads // case.kv_heads
    for fields in _smaller(case, group):
        if _products(case) <= most:
            break
        changed = case.with_fields(fields)
        case = changed if _products(changed) < _products(case) and is_usable(changed, variant) else case
    return case


def _smaller(case: Case, group: int) -> Iterable[dict[str, Any]]:
    yield {"batch": 1}
    yield {"heads": group, "kv_heads": 1}
    for most in (4 * TILE, TILE):
        yield {"seq_q": min(case.seq_q, most)}
        yield {"seq_q": min(case.seq_q, most), "seq_k": min(case.seq_k, most)}


def _products(case: Case) -> int:
    return case.batch * case.heads * case.seq_q * case.seq_k * case.head_dim
