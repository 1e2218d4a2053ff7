"""What matters in a failing example: each of its values is changed in turn, and the others stay.

Shrinking gives the smallest example, but not a rule such as `S_q % 128 = 64`.  Here, the values that fail and those
that do not are compared with a few forms of rules, the simplest first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from pytest_fa.attention import parts
from pytest_fa.attention.token import Token
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.example import Example

Fails = Callable[[Example], bool | None]  # None for an example that cannot be judged
LENGTHS = (1, 2, 16, 17, 32, 63, 64, 65, 96, 128, 129, 192, 256, 257)
COUNTS = (1, 2, 3, 5)
MODULI = (2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 256)
SEEDS = (0, 1, 2)
NAMES = {"seq_q": "S_q", "seq_k": "S_k", "head_dim": "D", "batch": "B", "heads": "H"}


class Need(NamedTuple):
    """One thing that a fault needs, in words, and which examples have it."""

    words: str
    holds: Callable[[Example], bool]
    is_list: bool = False  # of the sizes that fail, among which no rule was found


def what_matters(example: Example, variant: Variant, fails: Fails) -> tuple[Need, ...]:
    """The rules that the failing examples near this one have in common.  Each further one is judged by `fails`."""
    rules = [
        _property_rule(example, fails),
        *(_text_rule(example, token, fails) for token in _tokens(example.case)),
        _choice_rule(example, "dtype", variant.supports.dtype, fails),
        _size_rule(example, "head_dim", _head_dims(variant, example.case), fails),
        _size_rule(example, "batch", COUNTS, fails),
        _size_rule(example, "heads", COUNTS, fails),
        *_tried_lengths(example, fails),
    ]
    of_data = _seed_rule(example, fails)
    needs = [rule for rule in rules if rule and not (of_data and rule.is_list)]  # other sizes have other data
    return (*needs, *([of_data] if of_data else []))


def names_of(example: Example) -> tuple[Need, ...]:
    """A rule for each text of the id, and for the property: what may matter if nothing else can be judged."""
    rules = [_rule_of_text(token, example.case) for token in _tokens(example.case)]
    rules += [_rule_of_property(example.property_name)] if example.property_name else []
    return tuple(rule._replace(words=f"{rule.words} (nothing else was tried)") for rule in rules)


def _rule_of_text(token: Token, case: Case) -> Need:
    return Need(f"-{case.text_of(token)}", lambda other: bool(other.case.text_of(token)))


def _rule_of_property(name: str) -> Need:
    return Need(f"property {name}", lambda other: other.property_name == name)


def _tokens(case: Case) -> list[Token]:
    """The tokens that the id has, but for the number of keys."""
    return [token for token in parts.tokens() if token.field != "seq_k" and case.text_of(token)]


def _with(example: Example, fields: Mapping[str, Any]) -> Example:
    """The example with other values of its case; equal numbers of heads and of tokens stay equal."""
    case, changes = example.case, dict(fields)
    if "heads" in changes and "kv_heads" not in changes:
        of_k = case.heads // case.kv_heads
        changes |= {"heads": changes["heads"] * of_k, "kv_heads": changes["heads"]}
    if "seq_q" in changes and "seq_k" not in changes and case.seq_q == case.seq_k:
        changes["seq_k"] = changes["seq_q"]
    return example._replace(case=case.with_fields(changes))


def _property_rule(example: Example, fails: Fails) -> Need | None:
    name = example.property_name
    if not name or fails(example._replace(property_name="")) is not False:
        return None
    return _rule_of_property(name)


def with_one_text_less(example: Example) -> Iterator[Example]:
    """The example without one of the texts of its id, for each of them."""
    without = (_without(example, token) for token in _tokens(example.case))
    return (other for other in without if other != example)


def _without(example: Example, token: Token) -> Example:
    plain = token.plain(example.case) if token.field in Case.__struct_fields__ else None
    return _with(example, {token.field: plain})


def _text_rule(example: Example, token: Token, fails: Fails) -> Need | None:
    """Whether a text of the id matters."""
    if fails(_without(example, token)) is not False:
        return None
    return _rule_of_text(token, example.case)


def _choice_rule(example: Example, field: str, values: Iterable[Any], fails: Fails) -> Need | None:
    own = example.case.value_of(field)
    failing = {own} | {value for value in values if value != own and fails(_with(example, {field: value}))}
    if all(value in failing for value in values):
        return None
    return Need(
        f"{field} {' or '.join(map(str, sorted(failing)))}", lambda other: other.case.value_of(field) in failing
    )


def _head_dims(variant: Variant, case: Case) -> tuple[int, ...]:
    """Some head_dims of the dtype: the nearest to that of the case, and the first and last."""
    sizes = sorted({size for dtype, size in variant.instantiations if dtype == case.dtype})
    near = sorted(sizes, key=lambda size: abs(size - case.head_dim))[:4]
    return tuple(dict.fromkeys((*near, *sizes[:1], *sizes[-1:])))


def _size_rule(example: Example, field: str, values: Iterable[int], fails: Fails) -> Need | None:
    """The rule of a size that matters alone."""
    own = example.case.value_of(field)
    tried: dict[int, bool] = {own: True}
    for value in values:
        other = _with(example, {field: value})
        if other.case.value_of(field) not in tried and (failed := fails(other)) is not None:
            tried[other.case.value_of(field)] = failed
    return _rule_of(field, own, tried)


def _rule_of(field: str, own: int, tried: Mapping[int, bool]) -> Need | None:
    """The first form of rule that fits what failed."""
    if all(tried.values()):
        return None
    name = NAMES.get(field, field)
    for words, holds in _forms(name, own, tried):
        if all(holds(value) == failed for value, failed in tried.items()):
            return Need(words, lambda other, holds=holds: holds(other.case.value_of(field)))  # type: ignore[misc]
    failing = sorted(value for value, failed in tried.items() if failed)
    right = sorted(value for value, failed in tried.items() if not failed)
    words = f"{name} = {_listed(failing)} (right: {_listed(right)})"
    return Need(words, lambda other: other.case.value_of(field) in failing, is_list=True)


def _forms(name: str, own: int, tried: Mapping[int, bool]) -> Iterator[tuple[str, Callable[[int], bool]]]:
    failing = [value for value, failed in tried.items() if failed]
    least, most = min(failing), max(failing)
    if len(failing) == 1:
        right = sorted(value for value, failed in tried.items() if not failed)
        yield f"{name} = {own} (right: {_listed(right)})", partial(operator.eq, own)
    yield f"{name} >= {least}", partial(operator.le, least)
    yield f"{name} <= {most}", partial(operator.ge, most)
    for modulus in MODULI:
        rest = own % modulus
        yield f"{name} % {modulus} = {rest}", partial(_has_rest, modulus, rest)
        yield f"{name} % {modulus} != 0", partial(_is_no_multiple, modulus, 0)
        yield f"{name} >= {least} and {name} % {modulus} != 0", partial(_is_no_multiple, modulus, least)


def _has_rest(modulus: int, rest: int, value: int) -> bool:
    return value % modulus == rest


def _is_no_multiple(modulus: int, least: int, value: int) -> bool:
    return value >= least and value % modulus != 0


def _tried_lengths(example: Example, fails: Fails) -> Iterator[Need]:
    """The rules of both lengths: one between them, or one of each."""
    case, tried = example.case, {(example.case.seq_q, example.case.seq_k): True}
    for field in ("seq_q", "seq_k"):
        own = case.value_of(field)
        for value in sorted({*LENGTHS, own - 1, own + 1, own + 64, 2 * own} - {0}):
            other = example._replace(case=case.with_fields({field: value}))
            pair = (other.case.seq_q, other.case.seq_k)
            if pair not in tried and (failed := fails(other)) is not None:
                tried[pair] = failed
    if all(tried.values()):
        return
    for words, holds in PAIRS.items():
        if all(holds(*pair) == failed for pair, failed in tried.items()):
            yield Need(words, lambda other, holds=holds: holds(other.case.seq_q, other.case.seq_k))  # type: ignore[misc]
            return
    of_q = {q: failed for (q, k), failed in tried.items() if k == case.seq_k}
    of_k = {k: failed for (q, k), failed in tried.items() if q == case.seq_q}
    if len(of_q) == 1:  # they must be equal
        of_both = {
            value: failed for value in LENGTHS if (failed := fails(_with(example, {"seq_q": value}))) is not None
        }
        of_q = {case.seq_q: True, **of_both}
    yield from filter(None, (_rule_of("seq_q", case.seq_q, of_q), _rule_of("seq_k", case.seq_k, of_k)))


PAIRS: Mapping[str, Callable[[int, int], bool]] = {
    "S_q != S_k": lambda queries, keys: queries != keys,
    "S_q > S_k": lambda queries, keys: queries > keys,
    "S_q < S_k": lambda queries, keys: queries < keys,
    "S_q = S_k": lambda queries, keys: queries == keys,
}


def _seed_rule(example: Example, fails: Fails) -> Need | None:
    """Whether the fault shows only with some data."""
    own = example.case.seed
    others = [example._replace(case=example.case.with_seed(seed)) for seed in (*SEEDS, own + 1) if seed != own]
    results = [failed for other in others if (failed := fails(other)) is not None]
    if all(results):
        return None
    words = f"the data: {1 + sum(results)} of {1 + len(results)} seeds fail"
    return Need(words, lambda _: True)


def _listed(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return shown if len(values) <= 6 else f"{shown}, ..."  # noqa: PLR2004
