"""The head size of values: a row of V, and of the output, may be longer or shorter than one of Q and K."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.mistake import TILES, Mistake, not_divided
from pytest_fa.attention.part import CallInputs, Part, Shape, shown
from pytest_fa.attention.sizes import PAIRED, RANGE, further_sizes, judged_sizes, read_range, shown_sizes
from pytest_fa.attention.token import Number

if TYPE_CHECKING:
    import torch

EQUAL = "equal"  # to the head_dim of Q and K


class ValueSize(Part):
    """V is [batch, kv_heads, seq_k, head_dim_v], and the output [batch, heads, seq_q, head_dim_v]."""

    name = "head_dim_v"
    summary = "a V with another head_dim than Q and K"
    tokens = (Number("head_dim_v", "dv", "size", like="head_dim"),)
    rows = (("`-dv128`", "V and the output have head_dim 128"),)
    supports = "head_dim_v"
    claims = (EQUAL,)
    claim_order = 1
    documented_claims = f"`{EQUAL}`, numbers, or a range"

    faults = dict.fromkeys(("v_first_64", "v_divided_first_64", "v_rows_of_k", "scale_of_v"), ("max", False))
    selftest_shapes = ("b1h2s113d64-fp16-dv128", "b1h2s113d64-fp16-dv32")

    def impossible(self, case: Shape) -> str | None:
        """A row of V has an element, and scores alone have no V."""
        size = case.value_of("head_dim_v")
        if size < 1:
            return f"head_dim_v is {size}; it must be at least 1"
        if case.computes == "scores" and size != case.head_dim:
            return "scores alone have no V; drop -dv"
        return None

    def in_words(self, case: Shape) -> str:
        """The size, for the title of a picture."""
        size = case.value_of("head_dim_v")
        return "" if size == case.head_dim else f", head_dim of V {size}"

    # -- the manifest -----------------------------------------------------------------------------------------------

    def read_claim(self, claim: object) -> tuple[Any, ...]:
        """Sizes as a list or as a range; `equal` in a list is that of Q and K."""
        key = f"supports.{self.supports}"
        if isinstance(claim, dict):
            return tuple(read_range(key, claim))
        values = claim if isinstance(claim, list) else []
        if values and all(value == EQUAL or (type(value) is int and value > 0) for value in values):
            return tuple(values)
        found = str(claim).replace("'", "") if isinstance(claim, list) else shown(claim)
        raise ValueError(
            f"{key} is {found}; write a list of sizes, such as `[64, 128]` or `[{EQUAL}, 128]`, or `{RANGE}`"
        )

    def shown_claims(self, supports: Any) -> str:  # `catalog.variant.Supports`
        """The sizes; a range in short."""
        supported = self.supported(supports)
        sizes = self._sizes(supports)
        texts = [*(["the head_dim of Q and K"] if EQUAL in supported else []), *([shown_sizes(sizes)] if sizes else [])]
        return ", ".join(texts)

    @property
    def varied(self) -> tuple[Any, ...]:
        """Rows of V that are wider than those of Q and K, and narrower ones."""
        return (EQUAL, *PAIRED)

    def judged_claims(self, supports: Any, head_dims: Collection[int]) -> tuple[Any, ...]:  # `catalog.variant.Supports`
        """The size of Q and K, which is `equal`, and a few others."""
        equal = (EQUAL,) if {EQUAL, *head_dims} & {*self.supported(supports)} else ()
        return (*equal, *(size for size in judged_sizes(self._sizes(supports)) if {*head_dims} - {size}))

    def further_claims(self, supports: Any) -> tuple[Any, ...]:  # `catalog.variant.Supports`
        """Most sizes of a range."""
        return further_sizes(self._sizes(supports))

    def _sizes(self, supports: Any) -> list[int]:
        return [size for size in self.supported(supports) if size != EQUAL]

    def claimed_by(self, case: Shape) -> Any:
        """The size, if it is another one."""
        size = case.value_of("head_dim_v")
        return EQUAL if size == case.head_dim else size

    def fields_with(self, claim: Any, heads: int) -> dict[str, Any]:  # noqa: ARG002
        """The size; None for that of Q and K."""
        return {"head_dim_v": None if claim == EQUAL else claim}

    def claim_words(self, claim: Any) -> str:
        """The size that was not judged."""
        return "equal head_dims of K and V" if claim == EQUAL else f"head_dim {claim} of V"

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # `catalog.variant.Supports`
        """A size that is not claimed; baselines that take any head_dim refuse a call themselves."""
        if supports.any_head_dim or {case.value_of("head_dim_v"), self.claimed_by(case)} & {*self.supported(supports)}:
            return None
        return f"head_dim_v is {case.value_of('head_dim_v')}, supports {self.shown_claims(supports)}{remedy}"

    # -- the judge --------------------------------------------------------------------------------------------------

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Only the first columns of V are computed or divided, and rows of V are read at the stride of K."""
        head_dim, size = inputs.q.shape[3], inputs.v.shape[3]
        for kept in sorted({64, head_dim, *(size // tile * tile for tile in TILES)}):
            if 0 < kept < size:
                words = f"only the first {kept} of the {size} dims of V are computed"
                yield Mistake(f"{words}: look at the loop over the output's dims", partial(_cut_off, kept))
                if inputs.word("sink") is None:
                    yield _divided_in_part(kept, size)
        if head_dim < size == inputs.v.stride(2):
            words = f"rows of V are read as if they had {head_dim} elements, as those of K, not {size}"
            yield Mistake(f"{words}: look at the strides of V", partial(_rows_of, head_dim))


def _cut_off(kept: int, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    """The inputs with zeros in V after some columns."""
    v: torch.Tensor = inputs.v.clone()
    v[..., kept:] = 0
    return inputs._replace(v=v)


def _rows_of(size: int, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    """The inputs with rows of V that begin every `size` elements, which stay within their head."""
    v: torch.Tensor = inputs.v
    return inputs._replace(v=v.as_strided(v.shape, (*v.stride()[:2], size, 1), v.storage_offset()))


def _with_ones(inputs: Any) -> Any:  # as above
    """The inputs with a column of ones behind V."""
    v: torch.Tensor = inputs.v.new_ones((*inputs.v.shape[:3], inputs.v.shape[3] + 1))
    v[..., :-1] = inputs.v
    return inputs._replace(v=v)


def _divided_in_part(kept: int, size: int) -> Mistake:
    """The row sum is the last column of P V if V has a column of ones."""

    def arrange(out: torch.Tensor) -> torch.Tensor:  # [batch, heads, seq_q, size + 1]
        row_sum, result = out[..., size:], out[..., :size].clone()
        result[..., :kept] /= row_sum.where(row_sum > 0, 1.0)
        return result

    words = f"only the first {kept} of the {size} dims of the output are divided by the row sum: look at the end"
    return Mistake(words, _with_ones, weigh=not_divided, arrange=arrange, arranges_rows=True)


PART = ValueSize()
