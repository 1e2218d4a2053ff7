"""The layout: the order of the axes of q, k, v and the output in memory, and whether q, k and v are one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pytest_fa.attention.mistake import Mistake
from pytest_fa.attention.part import CallInputs, Part, Shape
from pytest_fa.attention.token import Choice
from pytest_fa.errors import UnsupportedCase

if TYPE_CHECKING:
    import torch

AxisOrder = Literal["bhsd", "bshd"]
CallLayout = Literal[AxisOrder, "thd"]
Layout = Literal[CallLayout, "packed"]
SELF_ATTENTION = "q, k and v are views of one tensor"


class LayoutPart(Part):
    """[batch, heads, seq, head_dim], or the heads after the sequence; the strides of a call say which.

    `packed` is one tensor [batch, seq, heads + 2 kv_heads, head_dim], as a fused projection writes it, of which q, k
    and v are views.  The output is [batch, seq, heads, head_dim].  Of `thd`, see `thd.py`.
    """

    name = "layout"
    summary = "the order of the axes in memory"
    tokens = (Choice("layout", (("bshd", "bshd"), ("packed", "packed"), ("thd", "thd")), "bhsd"),)
    rows = (
        ("`-bshd`", "memory layout [batch, seq, heads, head_dim]"),
        ("`-packed`", "q, k and v are views of one tensor [batch, seq, heads + 2 kv_heads, head_dim]"),
        ("`-thd`", "sequences behind one another, [rows, heads, head_dim] in memory, with `cu_seqlens`"),
    )
    supports = "layout"
    claims = ("bhsd", "bshd", "packed", "thd")
    made_words = {
        "qkv": ("qkv", "packed_qkv", "qkv_packed"),
        "qkv_heads": (),
        "kv": ("kv", "packed_kv", "kv_packed"),
    }
    is_after_scores = False
    faults = {"strides_ignored": ("max", False)}
    selftest_shapes = ("b1h2s65d64-bf16-bshd", "b2h4s65d64-fp16-kv2-packed")

    # -- the case ---------------------------------------------------------------------------------------------------

    def impossible(self, case: Shape) -> str | None:
        """One tensor has one length and one head_dim."""
        if case.value_of("layout") != "packed":
            return None
        if case.value_of("pages") != "none" or case.value_of("cache_dtype") != "none":
            return f"{SELF_ATTENTION}, which is no cache; drop -packed"
        if case.seq_q != case.seq_k:
            return f"{SELF_ATTENTION}, which has one length; drop -sk"
        if case.head_dim != case.value_of("head_dim_v"):
            return f"{SELF_ATTENTION}, which has one head_dim; drop -dv"
        return None

    # -- the manifest -----------------------------------------------------------------------------------------------

    def needs_one_length(self, claim: Any) -> bool:  # one of `claims`
        """One tensor has one length."""
        return bool(claim == "packed")

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The layout that was not judged."""
        return f"layout {claim}"

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A function of one tensor takes no other layout, and one of contiguous tensors needs a case in theirs."""
        if packed := next(filter(call.passes, self.made_words), None):
            return next(_packed_problems(packed, call, supports), None)
        if call.contiguous and call.layout not in supports.layout:
            layouts = ", ".join(supports.layout)
            return f"entry.call takes only contiguous {call.layout} tensors, but supports.layout is {layouts}"
        return None

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """One tensor that is read with its axes in another order."""
        q, k, v = inputs.q, inputs.k, inputs.v
        if q.shape != k.shape or q.shape[1] == 1 or not is_packed(q, k, v):
            return
        words = "of the one tensor, q, k and v of a head are read behind each other, [heads, 3, head_dim]: they are {}"
        yield Mistake(words.format("[3, heads, head_dim]"), change=_read_by_head)

    # -- the call ---------------------------------------------------------------------------------------------------

    def made(self, word: str, words: Mapping[str, Any], conventions: Mapping[str, str]) -> torch.Tensor:  # noqa: ARG002
        """The tensor of which q, k and v, or k and v, are views."""
        q, k, v = (words[name] for name in "qkv")
        if k.data_ptr() - q.data_ptr() != q.shape[1] * q.stride(1) * q.element_size() or v.data_ptr() < k.data_ptr():
            raise UnsupportedCase(f"{word} is passed, but q, k and v are no views of one tensor (layout packed)")
        if word == "qkv_heads":
            return whole_of(q, k, v)
        views = (q, k, v)[3 - len(word) :]
        batch, heads, seq, dim = views[0].shape
        strides = views[0].stride()
        step = views[1].storage_offset() - views[0].storage_offset()
        together: torch.Tensor = views[0].as_strided(
            (batch, seq, len(views), heads, dim), (strides[0], strides[2], step, strides[1], strides[3])
        )
        return together


def _packed_problems(word: str, call: Any, supports: Any) -> Iterator[str]:  # `catalog.variant.Call`, `Supports`
    """What is wrong with a call that passes one tensor for several of q, k and v."""
    if supports.layout != ("packed",):
        layouts = ", ".join(supports.layout)
        yield f"entry.call passes {word!r}, but supports.layout is {layouts}; write `layout: [packed]`"
    if not supports.self_attention_only:
        remedy = "add `self_attention_only: true` to supports"
        yield f"entry.call passes {word!r}, and then q, k and v have one length; {remedy}"
    if supports.grouped_heads and word == "qkv":
        yield (
            "entry.call passes 'qkv', [batch, seq, 3, heads, head_dim], but supports.grouped_heads is true; "
            "pass 'qkv_heads', [batch, seq, heads + 2 kv_heads, head_dim], or drop grouped_heads"
        )
    if call.contiguous:
        yield f"entry.call passes {word!r}, of which q, k and v are no contiguous parts; drop contiguous"


def passed_within(word: str) -> tuple[str, ...]:
    """The words of `entry.call` whose tensor q, k or v is a part of."""
    return ("qkv", "qkv_heads") if word == "q" else ("qkv", "qkv_heads", "kv", "kv_cache")


def is_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether q, k and v are views of one tensor, as `views_of_whole` gives them."""
    if len({tensor.untyped_storage().data_ptr() for tensor in (q, k, v)}) > 1 or not q.numel():
        return False
    views = views_of_whole(whole_of(q, k, v), k.shape[1])
    return all(
        (view.data_ptr(), view.shape, view.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
        for view, tensor in zip(views, (q, k, v), strict=True)
    )


def whole_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The tensor of which q, k and v are views, [batch, seq, heads + 2 kv_heads, head_dim]."""
    batch, heads, seq, dim = q.shape
    strides = q.stride()
    return q.as_strided(
        (batch, seq, heads + k.shape[1] + v.shape[1], dim), (strides[0], strides[2], strides[1], strides[3])
    )


def views_of_whole(whole: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k and v, [batch, heads or kv_heads, seq, head_dim], as views of `whole_of` them."""
    starts = (0, whole.shape[2] - 2 * kv_heads, whole.shape[2] - kv_heads)
    ends = (*starts[1:], whole.shape[2])
    return tuple(whole[:, :, start:end].transpose(1, 2) for start, end in zip(starts, ends, strict=True))


def _read_by_head(inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    """The call with q, k and v as a kernel has them that takes the one tensor as [batch, seq, heads, 3, head_dim]."""
    whole = whole_of(*inputs[:3])
    q, k, v = (whole[:, :, place::3].transpose(1, 2) for place in range(3))
    return inputs._replace(q=q, k=k, v=v)


def stored(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor, [batch, heads, seq, head_dim], stored in the order of a layout."""
    return swapped(swapped(tensor, layout).contiguous(), layout)


def swapped(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view with heads and sequence exchanged if the layout has the heads last; the exchange is its own inverse."""
    return tensor if layout == "bhsd" else tensor.transpose(1, 2)


def strides(layout: Layout, heads: int, sequence: int, head_dim: int) -> tuple[int, int, int, int]:
    """The strides of a dense tensor in elements, for batch, head, sequence and head_dim; packed, all heads count."""
    of_batch = heads * sequence * head_dim
    return (
        (of_batch, sequence * head_dim, head_dim, 1) if layout == "bhsd" else (of_batch, head_dim, heads * head_dim, 1)
    )


PART = LayoutPart()
