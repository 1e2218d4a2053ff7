"""Factors: what may differ between cases (dtype, head_dim, parts of attention), and a few cases with any two values.

A case is possible if each part says so (`Part.impossible`), and if each value of it is that which was chosen: one part
may overrule another one.  A variant may refuse two values together (`Part.refusal`), such as a size of V beside that of
K.  The fields that a part reads for this answer tell which factors are to blame.

Where queries see one key or none, the weights are 1, so most mistakes do not show.  Such a case counts only for pairs
that no other case can have, such as one query under a top-left mask.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from pytest_fa.attention import parts
from pytest_fa.attention.dtypes import Dtype
from pytest_fa.attention.part import Part
from pytest_fa.attention.token import Token
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.covering import RowOfNumbers, Rows
from pytest_fa.catalog.variant import Supports

KEYS_THAT_TELL = 1.5  # on average; more than that
HEAD_DIM, FIRST_PART = 1, 2  # the places of head_dim and of the first part, after dtype


class Claim(NamedTuple):
    """One combination of values; `values` are those of `parts`."""

    dtype: Dtype
    head_dim: int
    values: tuple[object, ...]
    parts: tuple[Part, ...]

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
        return sum(value != part.claims[0] for part, value in self.by_part)

    @property
    def needs_two_lengths(self) -> bool:
        """Whether it shows only in a case whose numbers of queries and keys differ."""
        return any(part.needs_two_lengths(value) for part, value in self.by_part)

    def lengths(self, seq_q: int, seq_k: int) -> tuple[int, int]:
        """The numbers of queries and of keys, equal if the claim needs it."""
        needs_one = any(part.needs_one_length(value) for part, value in self.by_part)
        return (max(seq_q, seq_k),) * 2 if needs_one else (seq_q, seq_k)

    @property
    def by_part(self) -> tuple[tuple[Part, object], ...]:
        """The parts, each with its value."""
        return tuple(zip(self.parts, self.values, strict=True))

    def with_value(self, place: int, value: object) -> Claim:
        """The claim with another value of a part, given by its place."""
        values = (value if number == place else each for number, each in enumerate(self.values, start=FIRST_PART))
        return self._replace(values=tuple(values))

    def applied_to(self, case: Case, used: Counter[Any] | None = None) -> Case:
        """The case with these values, and as many heads as they need.

        `used`, which counts the items of `placed` in other cases, chooses among `Part.fields_in_turn`, as far as the
        case is possible and tells.
        """
        heads = case.heads
        fields = {"head_dim": self.head_dim}
        for part, value in self.by_part:
            fields |= part.fields_with(value, heads)
        case = case.with_dtype(self.dtype).with_fields(fields)
        for place, (part, value) in enumerate(self.by_part if used is not None else (), start=FIRST_PART):
            in_turn = part.fields_in_turn(value, heads)
            if len(in_turn) == 1:  # which the case has
                continue
            turn = used[place, value] if used else 0
            tried = (case.with_fields(in_turn[(turn + step) % len(in_turn)]) for step in range(len(in_turn)))
            case = next((each for each in tried if _conflict(each, self, must_tell=True) is None), case)
        return case


def tells(case: Case) -> bool:
    """Whether its queries see several keys."""
    return case.visible_pairs > KEYS_THAT_TELL * case.seq_q


def _conflict(case: Case, claim: Claim, *, must_tell: bool) -> set[str] | None:
    """The fields because of which a case is not possible, or has other values than the claim; None if it is right.

    With `must_tell`, a case that does not tell is not possible.
    """
    for part in parts.PARTS:
        if part.impossible(case):
            return _fields_read(part.impossible, case)
    for part, value in claim.by_part:
        if part.claimed_by(case) != value:
            return _fields_read(part.claimed_by, case) | set(part.fields_with(value, case.heads))
    return _fields_read(tells, case) if must_tell and not tells(case) else None


def _fields_read(answer: Callable[[Any], object], case: Case) -> set[str]:
    """The fields on which what a part answers about a case depends."""
    reading = _Reading(case)
    answer(reading)
    return reading.fields


def claim_of(case: Case, of: Iterable[Part] | None = None) -> Claim:
    """The values of a case; of the parts that a manifest claims, unless others are given."""
    chosen = tuple(parts.claimed_parts() if of is None else of)
    return Claim(case.dtype, case.head_dim, tuple(part.claimed_by(case) for part in chosen), chosen)


class Factors:
    """The values of dtype, head_dim and some parts that the cases like `plain` can have."""

    def __init__(
        self,
        plain: Case,
        dtypes_with_head_dims: Iterable[tuple[Dtype, int]],
        values: Mapping[Part, tuple[object, ...]],
        once: Iterable[tuple[int, object]] = (),  # places, each with a value there of which one case is enough
        supports: Supports | None = None,  # of the variant whose cases they are
    ) -> None:
        self.plain = plain
        self._supports = supports
        self.dtypes_with_head_dims = tuple(dtypes_with_head_dims)
        self._parts = tuple(values)
        firsts = (tuple(dict.fromkeys(pair[place] for pair in self.dtypes_with_head_dims)) for place in (0, 1))
        self.values: tuple[tuple[Any, ...], ...] = (*firsts, *values.values())
        self._fields = [
            {"dtype", *(field for part in parts.PARTS for dtype in self.values[0] for field in part.fields_for(dtype))},
            {"head_dim"},
            *({field for value in of for field in part.fields_with(value, plain.heads)} for part, of in values.items()),
        ]
        self.once = frozenset((place, value) for place, value in once if value in self.values[place])
        sizes, numbers = tuple(map(len, self.values)), [(p, self.values[p].index(value)) for p, value in self.once]
        self._telling = Rows(sizes, functools.partial(self._conflict, must_tell=True), numbers)
        self._rows = Rows(sizes, self._conflict, numbers)

    @functools.cached_property
    def claims(self) -> list[Claim]:
        """Claims as those of `covering`; the first is the plainest."""
        first = self.first_with()
        return [first, *self.covering([first])] if first else []

    def covering(self, known: Iterable[Claim] = ()) -> list[Claim]:
        """Claims that have, together with those that are known, any two values which one case can have.

        Of the values of `once`, they have each one.
        """
        numbered = [self._numbered(claim) for claim in known]
        telling = self._telling.covering(numbered)
        others = self._rows.covering([*numbered, *(dict(enumerate(row)) for row in telling)])
        return [self._claim(row) for row in (*telling, *others)]

    def first_with(self, place: int | None = None, value: object = None) -> Claim | None:
        """The claim of the first values, with this value at a place; None if no case can have it."""
        chosen = {} if place is None else {place: self.values[place].index(value)}
        row = self._telling.first_with(chosen) or self._rows.first_with(chosen)
        return None if row is None else self._claim(row)

    def fuller(self, claim: Claim) -> Claim:
        """The claim with a value that is not plain of as many further parts as one case can have."""
        for place, part in enumerate(self._parts, start=FIRST_PART):
            if claim.flat[place] == part.claims[0]:
                others = (claim.with_value(place, value) for value in self.values[place] if value != part.claims[0])
                claim = next((other for other in others if self._is_possible(other)), claim)
        return claim

    def _is_possible(self, claim: Claim) -> bool:
        return self._telling.conflict(tuple(self._numbered(claim).values())) is None

    def _claim(self, row: RowOfNumbers) -> Claim:
        dtype, head_dim, *values = (of[number] for of, number in zip(self.values, row, strict=True))
        return Claim(dtype, head_dim, tuple(values), self._parts)

    def _numbered(self, claim: Claim) -> dict[int, int]:
        """The numbers of a claim's values, by their places."""
        placed = enumerate(zip(self.values, claim.flat, strict=True))
        return {place: of.index(value) for place, (of, value) in placed if value in of}

    def _conflict(self, row: RowOfNumbers, *, must_tell: bool = False) -> list[int] | None:
        """The places because of which no case has the values of a row; None if one has."""
        claim = self._claim(row)
        if claim[:2] not in self.dtypes_with_head_dims:
            return [0, 1]
        case = claim.applied_to(self.plain)
        if must_tell and not tells(case):  # other fields may
            case = claim.applied_to(self.plain, Counter())
        blamed = _conflict(case, claim, must_tell=must_tell)
        if blamed is None:
            blamed = self._refused(case)
        return None if blamed is None else [place for place, fields in enumerate(self._fields) if fields & blamed]

    def _refused(self, case: Case) -> set[str] | None:
        """The fields because of which the variant does not take a case; None if it does."""
        for part in self._parts if self._supports else ():
            if part.refusal(case, self._supports, ""):
                return _fields_read(lambda case, part=part: part.refusal(case, self._supports, ""), case)  # type: ignore[misc]
        return None


class _Reading:
    """A case that notes which of its fields are read, also by its own properties and methods."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.fields: set[str] = set()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of the field's type
        member = vars(Case).get(name)
        if isinstance(member, property) and member.fget:
            return member.fget(self)
        if isinstance(member, FunctionType):
            return MethodType(member, self)
        self.fields.add(name)
        return getattr(self._case, name)

    def text_of(self, token: Token) -> str:
        """What the id has of a token; whether that is plain may depend on other fields."""
        self.fields.add(token.field)
        token.plain(self)
        return self._case.text_of(token)
