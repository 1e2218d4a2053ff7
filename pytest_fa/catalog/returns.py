"""Check what a manifest says about further outputs: `returns`, and the words of `entry.call`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pytest_fa.attention import parts
from pytest_fa.catalog.variant import Variant


def returns_problem(variant: Variant) -> str | None:
    """Return the first problem (the key, the value found and what is allowed), or None."""
    return next(_problems(variant), None)


def _problems(variant: Variant) -> Iterator[str]:
    call, names = variant.entry.call, tuple(parts.outputs())
    allowed = [("out", *more) for count in range(len(names) + 1) for more in itertools.combinations(names, count)]
    if variant.returns not in allowed:
        listed = " and ".join(f"[{', '.join(each)}]" for each in allowed)
        yield f"returns is [{', '.join(variant.returns)}]; allowed are {listed}"
    yield from filter(None, (part.manifest_problem(variant) for part in parts.PARTS))
    if call and isinstance(call.returns, tuple) and not call.passes("out") and call.place_of("out") is None:
        yield "entry.call.returns has no 'out', and 'out' is not passed; add 'out' to one of them"
