"""Check what a manifest says about the log-sum-exp: `returns`, and the words of `entry.call`."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.catalog.variant import Variant

ALLOWED = (("out",), ("out", "lse"))


def returns_problem(variant: Variant) -> str | None:
    """Return the first problem (the key, the value found and what is allowed), or None."""
    return next(_problems(variant), None)


def _problems(variant: Variant) -> Iterator[str]:
    call, listed = variant.entry.call, f"[{', '.join(variant.returns)}]"
    if variant.returns not in ALLOWED:
        yield f"returns is {listed}; allowed are [out] and [out, lse]"
    wants_lse = "lse" in variant.returns
    if wants_lse and variant.computes == "scores":
        yield f"returns is {listed}, but computes is 'scores', which have no log-sum-exp; write [out]"
    if call is None:
        return
    names_lse = call.passes("lse"), call.place_of("lse") is not None
    if wants_lse and not any(names_lse):
        yield (
            f"returns is {listed}, but entry.call names no 'lse'; add it to arguments if the function writes it, or "
            f"write `returns: [out, lse]` in entry.call if the function returns it"
        )
    if not wants_lse and any(names_lse):
        yield f"entry.call names 'lse', but returns is {listed}; write `returns: [out, lse]` at the top level, too"
    if all(names_lse):
        yield "entry.call passes 'lse' and names it in returns; use only one of the two"
    if isinstance(call.returns, tuple) and not call.passes("out") and call.place_of("out") is None:
        yield "entry.call.returns has no 'out', and 'out' is not passed; add 'out' to one of them"
