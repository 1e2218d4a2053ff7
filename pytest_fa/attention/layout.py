"""The layout: the order of the axes of q, k, v and the output in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pytest_fa.attention.part import Part
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

Layout = Literal["bhsd", "bshd"]


class AxisOrder(Part):
    """[batch, heads, seq, head_dim], or the heads after the sequence; the strides of a call say which."""

    name = "layout"
    summary = "the order of the axes in memory"
    tokens = (Choice("layout", (("bshd", "bshd"),), "bhsd"),)
    rows = (("`-bshd`", "memory layout [batch, seq, heads, head_dim]"),)
    supports = "layout"
    claims = ("bhsd", "bshd")
    is_after_scores = False
    faults = {"strides_ignored": ("max", False)}
    selftest_shapes = ("b1h2s65d64-bf16-bshd",)

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The layout that was not judged."""
        return f"layout {claim}"

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A function that takes only contiguous tensors needs a case in their layout."""
        if call.contiguous and call.layout not in supports.layout:
            layouts = ", ".join(supports.layout)
            return f"entry.call takes only contiguous {call.layout} tensors, but supports.layout is {layouts}"
        return None


def stored(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor, [batch, heads, seq, head_dim], stored in the order of a layout."""
    return swapped(swapped(tensor, layout).contiguous(), layout)


def swapped(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view with heads and sequence exchanged if the layout has the heads last; the exchange is its own inverse."""
    return tensor.transpose(1, 2) if layout == "bshd" else tensor


def strides(layout: Layout, heads: int, sequence: int, head_dim: int) -> tuple[int, int, int, int]:
    """The strides of a dense tensor in elements, for batch, head, sequence and head_dim."""
    of_batch = heads * sequence * head_dim
    return (
        (of_batch, head_dim, heads * head_dim, 1) if layout == "bshd" else (of_batch, sequence * head_dim, head_dim, 1)
    )


PART = AxisOrder()
