"""Grouped heads: several heads of q share one head of k and v (grouped-query and multi-query attention)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.mistake import Mistake
from pytest_fa.attention.part import CallInputs, Convention, Part, Shape
from pytest_fa.attention.token import Number

if TYPE_CHECKING:
    import torch

GROUP = 2  # the heads of a group in a case of a claim
# Heads of q, and of k and v: groups of six, three and four.
IN_TURN = ((6, 1), (6, 2), (8, 2))


class GroupedHeads(Part):
    """Head h of q reads head h // (heads / kv_heads) of k and v."""

    name = "grouped_heads"
    summary = "several heads of q share one head of k and v"
    tokens = (Number("kv_heads", "kv", "heads", like="heads"),)
    rows = (("`-kv2`", "2 key/value heads"),)
    supports = "grouped_heads"
    claims = (False, True)
    is_after_scores = False
    claim_order = 1
    faults = {"heads_modulo": ("max", False)}
    conventions = {
        "groups": Convention(
            {
                "blocks": "query heads are mapped to key heads in groups, h // group",
                "interleaved": "query heads are mapped to key heads modulo, h % kv_heads, not in groups",
            }
        )
    }

    def impossible(self, case: Shape) -> str | None:
        """The groups are equal."""
        kv_heads = case.value_of("kv_heads")
        if kv_heads < 1:
            return f"kv_heads is {kv_heads}; it must be at least 1"
        if case.heads % kv_heads:
            return f"{case.heads} heads cannot share {kv_heads} key/value heads evenly"
        return None

    # -- the manifest -----------------------------------------------------------------------------------------------

    def supported(self, supports: Any) -> tuple[Any, ...]:  # `catalog.variant.Supports`
        """`grouped_heads: true` adds groups to equal numbers of heads."""
        return self.claims if supports.grouped_heads else self.claims[:1]

    def claimed_by(self, case: Shape) -> bool:
        """Whether heads are shared."""
        return bool(case.value_of("kv_heads") != case.heads)

    def claim_for(self, case: Shape) -> bool:  # noqa: ARG002
        """Equal numbers of heads are a grouping, too."""
        return True

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:  # one of `claims`
        """Groups of two heads, for which the number of heads is rounded up."""
        if not claim:
            return {"heads": heads, "kv_heads": heads}
        return {"heads": -(-heads // GROUP) * GROUP, "kv_heads": -(-heads // GROUP)}

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # one of `claims`
        """Groups of six, three and four heads."""
        groups = tuple({"heads": of_q, "kv_heads": of_k} for of_q, of_k in IN_TURN)
        return groups if claim else (self.fields_with(claim, heads),)

    def random_fields(self, claim: Any, heads: int, whole: Callable[[int, int], int]) -> Mapping[str, Any]:
        """Up to three groups of up to eight heads."""
        if not claim:
            return self.fields_with(claim, heads)
        of_k, group = whole(1, 3), whole(2, 8)
        return {"heads": of_k * group, "kv_heads": of_k}

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The grouping that was not judged."""
        return f"{'' if claim else 'un'}grouped heads"

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # noqa: ARG002  # the text says it
        """The numbers of heads, if they must be equal."""
        if supports.grouped_heads or not self.claimed_by(case):
            return None
        kv_heads = case.value_of("kv_heads")
        return f"kv_heads is {kv_heads} for {case.heads} heads, supports equal numbers (grouped_heads: false)"

    # -- the judge --------------------------------------------------------------------------------------------------

    def call_meant(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """Interleaved heads of K and V, each once for each head of Q."""
        order = key_heads(inputs)
        if inputs.convention("groups") is None or len(order) == inputs.k.shape[1]:
            return inputs
        descales = inputs.descales and inputs.descales._replace(
            k=inputs.descales.k[:, order], v=inputs.descales.v[:, order]
        )
        return inputs._replace(k=inputs.k[:, order], v=inputs.v[:, order], descales=descales)

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Query heads that read other heads of k and v than h // group."""
        heads, kv_heads = inputs.q.shape[1], inputs.k.shape[1]
        if kv_heads in (1, heads):
            return
        group = heads // kv_heads
        right = [head // group for head in range(heads)]
        known = [right]
        for words, order in _orders(heads, kv_heads, group):
            if order in known or max(order) >= kv_heads:
                continue
            known.append(order)
            both = () if order == [head % kv_heads for head in range(heads)] else ((("k", "v"), ""),)  # a convention
            for names, of in (*both, (("k",), " of K"), (("v",), " of V")):
                yield Mistake(words.format(of), partial(_in_order, names, order))


def _orders(heads: int, kv_heads: int, group: int) -> Iterator[tuple[str, list[int]]]:
    """The key head of each query head in wrong mappings, with words that have a place for the tensor."""
    h = range(heads)
    shift = (group - 1).bit_length()
    modulo = "query heads are mapped to key heads{} modulo, not in groups: look at h % kv_heads"
    yield modulo, [head % kv_heads for head in h]
    sizes = {kv_heads: ["the divisor is kv_heads"]}
    if 1 << shift != group:
        sizes.setdefault(1 << shift, []).append("the group is rounded up to a power of two")
        sizes.setdefault(1 << (shift - 1), []).append("the group is rounded down to a power of two")
    for size, reasons in sizes.items():
        words = f"query heads share key heads{{}} in groups of {size}, not {group}: look whether {' or '.join(reasons)}"
        yield words, [min(head // size, kv_heads - 1) for head in h]
    yield "query heads are mapped to key heads{} h % group: look at h / group", [head % group for head in h]
    yield "key heads{} are in reverse order: look at the head index", [kv_heads - 1 - head // group for head in h]


def _in_order(names: tuple[str, ...], order: list[int], inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    """The inputs with heads of k, of v or of both for each query head; those not named are as they should be."""
    heads = len(order)
    return inputs._replace(
        **{
            name: getattr(inputs, name)[:, order] if name in names else repeated(getattr(inputs, name), heads)
            for name in ("k", "v")
        }
    )


def key_heads(inputs: CallInputs) -> list[int]:
    """The head of K and V that each head of Q reads in a call as it is given."""
    heads, kv_heads = inputs.q.shape[1], inputs.k.shape[1]
    is_interleaved = inputs.convention("groups") == "interleaved"
    return [head % kv_heads if is_interleaved else head * kv_heads // heads for head in range(heads)]


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """K or V, [batch, kv_heads, seq_k, head_dim], with each of its heads repeated for the query heads that share it."""
    shared_by = heads // tensor.shape[1]
    return tensor if shared_by == 1 else tensor.repeat_interleave(shared_by, dim=1)


PART = GroupedHeads()
