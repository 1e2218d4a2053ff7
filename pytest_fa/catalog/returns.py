"""Check what a manifest says about further outputs: `returns`, and the words of `entry.call`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pytest_fa.attention import parts
from pytest_fa.attention.backward import GRADIENTS, LINE
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
    allowed = [("out", *more) for count in range(len(names) + 1) for more in itertools.combinations(names, count)]
    if any(name in GRADIENTS for name in variant.returns):
        yield f"returns is [{', '.join(variant.returns)}], but computes is {variant.computes!r}; write {LINE}"
    if variant.returns not in allowed:
        listed = " and ".join(f"[{', '.join(each)}]" for each in allowed)
        yield f"returns is [{', '.join(variant.returns)}]; allowed are {listed}"
    yield from filter(None, (part.manifest_problem(variant) for part in parts.PARTS))
    if call and isinstance(call.returns, tuple) and not call.passes("out") and call.place_of("out") is None:
        yield "entry.call.returns has no 'out', and 'out' is not passed; add 'out' to one of them"


def _problems_of_gradients(variant: Variant) -> Iterator[str]:
    """A backward pass writes all gradients, or returns them; with `entry.autograd`, its function returns `out`."""
    call, listed = variant.entry.call, f"[{', '.join(variant.returns)}]"
    if variant.returns != GRADIENTS:
        yield f"returns is {listed}, but computes is 'gradients'; write [{', '.join(GRADIENTS)}], or drop returns"
    if call is None or variant.entry.autograd:
        return
    for name in GRADIENTS:
        named = call.passes(name), call.place_of(name) is not None
        if not any(named):
            yield (
                f"entry.call names no {name!r}; add it to arguments if the function writes it, or write "
                f"`returns: [{', '.join(GRADIENTS)}]` in entry.call if the function returns it"
            )
        if all(named):
            yield f"entry.call passes {name!r} and names it in returns; use only one of the two"
