"""A covering array has any two values that one row can have, in few rows, and the same ones in each process."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence

import pytest

from pytest_fa.catalog.covering import RowOfNumbers, Rows

Rule = dict[int, int]  # values by their places that no row has together
Pair = tuple[tuple[int, int], tuple[int, int]]


def pairs_of(rows: Iterable[RowOfNumbers]) -> set[Pair]:
    """Any two values of a row, each with its place."""
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def conflict_of(rules: Sequence[Rule]) -> Callable[[RowOfNumbers], Iterable[int] | None]:
    """The places of the first rule that a row breaks."""
    return lambda row: next((list(rule) for rule in rules if all(row[p] == v for p, v in rule.items())), None)


def possible_rows(sizes: Sequence[int], rules: Sequence[Rule]) -> list[RowOfNumbers]:
    """All of the whole product that break no rule."""
    return [row for row in itertools.product(*map(range, sizes)) if conflict_of(rules)(row) is None]


def random_rules(seed: int) -> tuple[tuple[int, ...], list[Rule]]:
    """Some places, and rules about two or three of them; a rule may leave a value or everything without a row."""
    generator = random.Random(seed)  # noqa: S311  # no secret
    sizes = tuple(generator.randint(1, 4) for _ in range(generator.randint(2, 6)))
    chosen = (generator.sample(range(len(sizes)), min(len(sizes), generator.choice((2, 2, 3)))) for _ in range(9))
    return sizes, [{place: generator.randrange(sizes[place]) for place in places} for places in chosen]


@pytest.mark.parametrize("seed", range(60))
def test_every_pair_of_a_possible_row_occurs(seed: int) -> None:
    """The rows are possible, and have exactly the pairs that the possible rows of the whole product have."""
    sizes, rules = random_rules(seed)
    rows = Rows(sizes, conflict_of(rules)).covering()
    possible = possible_rows(sizes, rules)
    assert set(rows) <= set(possible)
    assert pairs_of(rows) == pairs_of(possible)


@pytest.mark.parametrize("seed", range(20))
def test_known_values_are_not_covered_again(seed: int) -> None:
    """With some rows that are known, the others have the pairs that those lack, and each adds at least one."""
    sizes, rules = random_rules(seed)
    possible = possible_rows(sizes, rules)
    known = possible[::3]
    rows = Rows(sizes, conflict_of(rules)).covering(dict(enumerate(row)) for row in known)
    assert pairs_of([*known, *rows]) == pairs_of(possible)
    assert all(pairs_of(rows[: place + 1]) > pairs_of(rows[:place]) for place in range(len(rows)))


@pytest.mark.parametrize("seed", range(40))
def test_known_values_without_some_places(seed: int) -> None:
    """Known values without that of a place, such as of another dtype, leave the pairs with it to be covered."""
    sizes, rules = random_rules(seed)
    possible = possible_rows(sizes, rules)
    known = [{place: value for place, value in enumerate(row) if place != seed % len(sizes)} for row in possible[::2]]
    rows = Rows(sizes, conflict_of(rules)).covering(known)
    of_known = {pair for values in known for pair in itertools.combinations(values.items(), 2)}
    assert of_known | pairs_of(rows) == pairs_of(possible)


@pytest.mark.parametrize("seed", range(20))
def test_places_with_one_value_leave_the_rows_as_they_are(seed: int) -> None:
    """More places of one value, first, in between and last, change nothing at the others."""
    some, rules = random_rules(seed)
    sizes = (*some, 2)
    several = [place for place, size in enumerate(sizes) if size > 1]
    rules = [rule for rule in rules if set(rule) <= set(several)]
    moved = [{several.index(place): value for place, value in rule.items()} for rule in rules]
    without = Rows([sizes[place] for place in several], conflict_of(moved)).covering()
    wider = (1, *(size for place in sizes for size in (place, 1)))
    spread = [{2 * place + 1: value for place, value in rule.items()} for rule in rules]
    rows = Rows(wider, conflict_of(spread)).covering()
    assert [tuple(row[2 * place + 1] for place in several) for row in rows] == without


@pytest.mark.parametrize("seed", range(30))
def test_of_some_values_one_row_is_enough(seed: int) -> None:
    """Each of these values is in a row if one can have it, and so is each other one; those have all their pairs."""
    sizes, rules = random_rules(seed)
    once = {(place, value) for place, size in enumerate(sizes) for value in range(1 + seed % 2, size)}
    rows, possible = Rows(sizes, conflict_of(rules), once).covering(), possible_rows(sizes, rules)
    assert set(rows) <= set(possible)
    assert {pair for pair in pairs_of(possible) if not once & {*pair}} <= pairs_of(rows)
    assert {placed for row in possible for placed in enumerate(row)} == {
        placed for row in rows for placed in enumerate(row)
    }


def test_a_value_of_one_row_costs_no_pairs() -> None:
    """Seven such values at each of two places stand together in seven rows, beside six of the other values' pairs."""
    once = [(place, value) for place in (0, 1) for value in range(2, 9)]
    rows = Rows((9, 9, 2, 2), lambda row: [0, 1] if row[0] == row[1] > 1 else None, once).covering()
    assert len(rows) <= 6 + 7


@pytest.mark.parametrize("seed", range(20))
def test_the_first_row_with_a_value(seed: int) -> None:
    """It is the first one of the whole product; there is none only if no row has the value."""
    sizes, rules = random_rules(seed)
    array, possible = Rows(sizes, conflict_of(rules)), possible_rows(sizes, rules)
    for place, size in enumerate(sizes):
        for value in range(size):
            first = next((row for row in possible if row[place] == value), None)
            assert array.first_with({place: value}) == first


FIFTEEN = (6, 6, 4, 3, 3, 3, 3, 3, *[2] * 7)
RULES: list[Rule] = [
    *({0: window, 4: mask} for window in range(1, 6) for mask in (1, 2)),
    *({3: bias, 8: 1} for bias in (1, 2)),
    {5: 2, 9: 1},
]


def test_fifteen_factors_need_few_rows() -> None:
    """Of 932 pairs of fifteen factors, 919 are possible, and occur in at most 45 rows; six values twice need 36."""
    rows = Rows(FIFTEEN, conflict_of(RULES)).covering()
    assert (len(pairs_of(rows)), len(rows) <= 45) == (932 - len(RULES), True)
    assert all(conflict_of(RULES)(row) is None for row in rows)
    assert len(Rows(FIFTEEN, lambda _: None).covering()) <= 40


@pytest.mark.alone
def test_it_takes_less_than_a_second() -> None:
    """The array of fifteen factors is made in well under a second."""
    start = time.perf_counter()
    Rows(FIFTEEN, conflict_of(RULES)).covering()
    assert time.perf_counter() - start < 1
