"""Check what a manifest says about further outputs: `returns`, and the words of `entry.call`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pytest_fa.attention import parts
from pytest_fa.attention.backward import ALL_GRADIENTS, GRADIENTS, LINE, OF_PARTS
from pytest_fa.catalog.variant import Variant


def returns_problem(variant: Variant) -> str | None:
    """Return the first problem (the key, the value found and what is allowed), or None."""
    return next(_problems(variant), None)


def _problems(variant: Variant) -> Iterator[str]:
    call, names = variant.entry.call, tuple(parts.outputs())
    if variant.computes == "gradients":
        yield from filter(None, (part.manifest_problem(variant) for part in parts.PARTS))
        yield from _problems_of_gradients(variant)
        return
    allowed = _with_any(("out",), names)
    if any(name in ALL_GRADIENTS for name in variant.returns):
        yield f"returns is [{', '.join(variant.returns)}], but computes is {variant.computes!r}; write {LINE}"
    if variant.returns not in allowed:
        yield f"returns is {_shown(variant.returns)}; allowed are {' and '.join(map(_shown, allowed))}"
    yield from filter(None, (part.manifest_problem(variant) for part in parts.PARTS))
    if call and isinstance(call.returns, tuple) and not call.passes("out") and call.place_of("out") is None:
        yield "entry.call.returns has no 'out', and 'out' is not passed; add 'out' to one of them"


def _problems_of_gradients(variant: Variant) -> Iterator[str]:
    """A backward pass writes all gradients, or returns them; with `entry.autograd`, its function returns `out`."""
    call, listed = variant.entry.call, _shown(variant.returns)
    if variant.returns not in _with_any(GRADIENTS, tuple(OF_PARTS)):
        needed = f"{_shown(GRADIENTS)}, which {' and '.join(OF_PARTS)} may follow"
        yield f"returns is {listed}, but computes is 'gradients'; write {needed}, or drop returns"
    added = {name: parts.words()[OF_PARTS[name]].supports for name in variant.returns if name in OF_PARTS}
    for name, key in added.items():
        if variant.supports.values_of(key, (False,)) in ((), (False,)):
            yield f"returns is {listed}, but supports.{key} is false; write `{key}: true`, or drop {name}"
    if call is None or variant.entry.autograd:
        return
    for name in OF_PARTS:
        if name not in variant.returns and (call.passes(name) or call.place_of(name) is not None):
            more = _shown((*variant.returns, name))
            yield f"entry.call has {name!r}, but returns is {listed}; write `returns: {more}` at the top level, too"
    for name in variant.returns:
        named = call.passes(name), call.place_of(name) is not None
        if not any(named):
            yield (
                f"entry.call names no {name!r}; add it to arguments if the function writes it, or write "
                f"`returns: {listed}` in entry.call if the function returns it"
            )
        if all(named):
            yield f"entry.call passes {name!r} and names it in returns; use only one of the two"


def _with_any(first: tuple[str, ...], further: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Outputs with any of the further ones behind them, in their order."""
    return [(*first, *more) for count in range(len(further) + 1) for more in itertools.combinations(further, count)]


def _shown(names: tuple[str, ...]) -> str:
    return f"[{', '.join(names)}]"
