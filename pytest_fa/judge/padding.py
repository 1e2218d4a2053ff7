"""Rows of an output that belong to no query of a ragged batch: what became of them, and an output without them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import OF_KEYS, OF_PARTS
from pytest_fa.attention.rows import Padding
from pytest_fa.gpu.inputs import Inputs, is_poison
from pytest_fa.records.checks import Bound

NAME = "rows past"
CONVENTION = "rows_past"
KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "untouched": is_poison,
    "zero": lambda out: out == 0,
    "any": lambda out: torch.ones_like(out, dtype=torch.bool),
}


def padding_of(output: str, inputs: Inputs) -> Padding | None:
    """The rows of an output of a call that are not judged: those of queries, or of keys in gradients of K and V.

    The gradients of a bias and a sink have none: what belongs to no query or key is 0 there.
    """
    if output in OF_PARTS:
        return None
    return parts.key_padding(inputs) if output in OF_KEYS else parts.padding(inputs)


def rows_of(padding: Padding, out: torch.Tensor) -> torch.Tensor:
    """Where an output, [batch, heads, seq_q] or with a further axis, is padding: the same shape."""
    rows = padding.rows if out.dim() == padding.rows.dim() else padding.rows[..., None]
    return rows.expand_as(out)


def cleared(padding: Padding | None, out: torch.Tensor, value: float | torch.Tensor = 0.0) -> torch.Tensor:
    """The output with a value in all padding."""
    return out if padding is None else out.where(~rows_of(padding, out), value)


def bound_of(padding: Padding, out: torch.Tensor) -> Bound:
    """How many elements of padding the kernel has changed, of which none may be."""
    changed = int((~KEPT[padding.rule](out))[rows_of(padding, out)].sum())
    return Bound(NAME, float(changed), 0.0, not changed)


def explain_padding(padding: Padding, out: torch.Tensor, side: tuple[str, str] = ("query", "queries")) -> str:
    """What a kernel does with padding in place of what its manifest declares; empty if that is what it does.

    `side` has the words for what a row belongs to, one and several.
    """
    if bound_of(padding, out).holds:
        return ""
    _, convention = parts.conventions()[CONVENTION]
    found = next(rule for rule in convention.values if bound_of(padding._replace(rule=rule), out).holds)
    if found == "any":
        words = f"rows that belong to no {side[0]} are written: write only the {side[1]} of each sequence"
        return f"{words}, or declare `conventions: {{{CONVENTION}: any}}`, as for a tensor that the kernel allocates"
    declared = None if padding.rule == convention.plain else padding.rule
    return convention.advice(CONVENTION, declared, found)
