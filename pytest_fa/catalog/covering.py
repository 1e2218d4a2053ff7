"""Covering arrays: a few rows of values that have any two values which one row can have.

A row has one value at each place.  Each row begins with a pair of values that no row has yet.  At each further place
it gets the value with the most such pairs, or else the one that the fewest rows have.  Of several rows, with the places
in other orders, the best one is taken.

Each value is a pair with itself, too.  Of some values, one row is enough: they have no other pair.

Some rows are not possible.  `conflict` says so of a whole row, and which of its places are to blame: no row with the
same values there is possible.  These combinations are noted, and those that follow from them.  So a pair is left out
only if it is proved that no row can have it.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

RankOfValue = Callable[[int, int], tuple[int, ...]]  # of a value that a row may get, and that row; the least goes first
RowOfNumbers = tuple[int, ...]  # for each place, the number of its value
CANDIDATES = 16  # rows of which the best one is taken


class Rows:
    """The possible rows with `sizes` values at the places.  Sets of values are the bits of an int."""

    def __init__(
        self,
        sizes: Sequence[int],
        conflict: Callable[[RowOfNumbers], Iterable[int] | None],
        once: Iterable[tuple[int, int]] = (),  # places, each with a value there of which one row is enough
    ) -> None:
        self.conflict = functools.cache(conflict)
        self._places: list[list[int]] = []
        for size in sizes:
            first = sum(map(len, self._places))
            self._places.append([1 << bit for bit in range(first, first + size)])
        # Each row has the only value of a place, which therefore makes no pairs: such places do not change the others.
        self._sole = sum(values[0] for values in self._places if len(values) == 1)
        self._once = {self._places[place][value] for place, value in once} | {*_bits(self._sole)}
        self._impossible = dict[int, dict[int, None]]()  # sets of values that no row has, by each of their values

    def first_with(self, values: Mapping[int, int]) -> RowOfNumbers | None:
        """The first possible row with these values, given by their places; None if no row has them."""
        others = [place for place in range(len(self._places)) if place not in values]
        chosen = self._set(values)
        row, _ = (0, 0) if self._known_impossible(chosen, chosen) else self._completed(chosen, others, lambda *_: ())
        return self._values(row) if row else None

    def covering(self, known: Iterable[Mapping[int, int]] = ()) -> list[RowOfNumbers]:
        """The rows that have, together with the values of `known`, any two values which one row can have.

        Of the values of `once`, they have each one that a row can have.
        """
        missing = self._pairs()
        for values in known:
            row = self._set(values)
            alone = 0 if self._sole & ~row else row  # without a sole value, it lacks the pairs with that
            for bit in _bits(row):
                missing[bit] &= ~row | bit & ~alone
        order, rows, used = random.Random(0), list[RowOfNumbers](), Counter[int]()  # noqa: S311  # the same in each process
        while pair := _next_pair(missing):
            if row := self._best_with(pair, missing, used, order):
                _remove(row, missing)
                rows.append(self._values(row))
                used.update(_bits(row))
                continue
            for bit in _bits(pair):  # each of both may have a row without the other one
                missing[bit] &= ~(pair - bit or bit)
        return rows

    def _set(self, values: Mapping[int, int]) -> int:
        return sum(self._places[place][value] for place, value in values.items())

    def _pairs(self) -> dict[int, int]:
        """For each value, itself and the values of all other places; for one of `once`, only itself."""
        paired = [sum(bit for bit in values if bit not in self._once) for values in self._places]
        return {
            bit: bit if bit in self._once else bit + sum(paired) - own
            for values, own in zip(self._places, paired, strict=True)
            for bit in values
        }

    def _best_with(self, pair: int, missing: Mapping[int, int], used: Counter[int], order: random.Random) -> int:
        """The row with a pair that has the most missing pairs; 0 if no row has the pair."""

        def rank(value: int, row: int) -> tuple[int, int]:
            return -(missing[value] & (row | value)).bit_count(), used[value]

        others = [place for place, values in enumerate(self._places) if not sum(values) & pair]
        sole, several = ([p for p in others if (len(self._places[p]) == 1) == is_sole] for is_sole in (True, False))
        best = 0
        is_impossible = self._known_impossible(pair, pair)
        for _ in range(CANDIDATES):
            places = [*sole, *sorted(several, key=lambda _: order.random())]
            row, _ = (0, 0) if is_impossible else self._completed(pair, places, rank)
            best = max(best, row, key=lambda row: sum((missing[bit] & row).bit_count() for bit in _bits(row)))
        return best

    def _completed(self, row: int, places: Sequence[int], rank: RankOfValue) -> tuple[int, int]:
        """The row with values at further places, or 0 and the values in the row because of which there are none."""
        if not places:
            conflict = self.conflict(self._values(row))
            return (row, 0) if conflict is None else (0, row & sum(sum(self._places[place]) for place in conflict))
        place, *others = places
        reasons = 0
        for value in sorted(self._places[place], key=lambda value: rank(value, row)):
            tried = row | value
            blamed = self._known_impossible(tried, value)
            if not blamed:
                whole, blamed = self._completed(tried, others, rank)
                if whole:
                    return whole, 0
                for bit in _bits(blamed):
                    self._impossible.setdefault(bit, {})[blamed] = None
            if not blamed & value:  # no other value here helps
                return 0, blamed
            reasons |= blamed & row
        return 0, reasons

    def _known_impossible(self, row: int, added: int) -> int:
        """A set of a row's values that no row has, with one of those `added`; 0 if none is known."""
        sets = (values for bit in _bits(added) for values in self._impossible.get(bit, ()))
        return next((values for values in sets if values & row == values), 0)

    def _values(self, row: int) -> RowOfNumbers:
        return tuple(next(n for n, bit in enumerate(values) if bit & row) for values in self._places)


def _next_pair(missing: Mapping[int, int]) -> int:
    """A missing pair of the values that have the most of them, or else one value; 0 if none is missing."""
    first = max(missing, key=lambda bit: missing[bit].bit_count())
    others = _bits(missing[first] & ~first)
    return missing[first] and first | max(others, key=lambda bit: missing[bit].bit_count(), default=0)


def _bits(values: int) -> Iterator[int]:
    while values:
        yield values & -values
        values &= values - 1


def _remove(row: int, missing: dict[int, int]) -> None:
    """Take the pairs of a row out of those that are missing."""
    for bit in _bits(row):
        missing[bit] &= ~row
