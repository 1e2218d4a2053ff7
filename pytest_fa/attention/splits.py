"""Splits: ranges of keys whose partial results a kernel merges.

A call says how many it wants, and 0 leaves that to the kernel.  The number changes no result.
"""

from __future__ import annotations

from typing import Any

from pytest_fa.attention.part import Part

WORD = "num_splits"


class Splits(Part):
    """The number of splits; only a property asks for one."""

    name = "splits"
    summary = "the number of ranges of keys"
    words = {WORD: (WORD, "num_kv_splits")}

    def plain_argument(self, word: str) -> int:  # noqa: ARG002  # its only word
        """The kernel's own choice."""
        return 0

    def passed_by(self, variant: Any) -> tuple[str, ...]:  # `catalog.variant.Variant`
        """A function that promises the same bits takes the number."""
        return (WORD,) if "split" in variant.invariant else ()

    def manifest_problem(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """A promise about splits needs a way to ask for them."""
        entry, what = variant.entry, f"invariant has 'split', but {{}} {WORD!r}; {{}}, or drop 'split'"
        if "split" not in variant.invariant:
            return None
        if entry.kind == "cuda":
            return what.format("the C interface has no", "call the kernel from a function of Python (entry.target)")
        if entry.call is not None and not entry.call.passes(WORD):
            return what.format("entry.call does not pass", "pass it")
        return None


PART = Splits()
