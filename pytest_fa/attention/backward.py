"""The backward pass: gradients of q, k, v and maybe a bias and a sink, from those of the output and of the log-sum-exp.

A case with `-bwd` asks for them.  A call of it has the tensors of its forward pass, the output and the log-sum-exp of
that pass, and the gradient of the output, dO.  The judge computes the output and the log-sum-exp from q, k and v.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.lse import PART as LOG_SUM_EXP
from pytest_fa.attention.part import Part, PartTensor, Shape
from pytest_fa.attention.ragged import behind, padding_of
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

GRADIENTS = ("dq", "dk", "dv")  # what each call writes; the first one is its `out` inside this package
# The gradients that a manifest may add, each with its tensor.  A call that has the tensor also writes its gradient.
OF_PARTS = {"dbias": "attn_bias", "dsink": "sink"}
ALL_GRADIENTS = (*GRADIENTS, *OF_PARTS)
OF_KEYS = {"dk": "k", "dv": "v"}  # gradients with a row for each key
LIKE = {**OF_KEYS, **OF_PARTS}  # the tensor whose shape a gradient has, besides dq
DOUT, OUT, LSE, DLSE = "dout", "forward_out", "forward_lse", "dlse"
RESULTS = (OUT, LSE)  # of the forward pass: the judge computes them
ROWS_OF_QUERIES = (LSE, DLSE)  # a number for each query
OF_QUERIES = (DOUT, OUT, *ROWS_OF_QUERIES)
OWN_OUT: Any = "own_out"  # among the roundings of a reference: delta is that of an output of the kernel's own
# The words of a manifest, in the order in which a function gets them, each with the name inside this package.
ARGUMENTS = {"dout": DOUT, "q": "q", "k": "k", "v": "v", "out": OUT, "lse": LSE}
DTYPES = ("fp16", "bf16")
# Fields of cases that have no gradients, with their plain values and what to drop.
WITHOUT = {
    "pages": ("none", "-page"),
    "cache_dtype": ("none", "-kv"),
    "append": (False, "-append"),
}
LAYOUTS = ("bhsd", "bshd", "thd")
INVARIANCES = ("batch", "position")  # others are about one row of the output
# What a manifest may call them, and the line to write.
NAMES = r"backward(_pass)?|bwd|d(q|k|v|bias|sink)|grad(ient)?s?(_(q|k|v|bias|sink))?"
LINE = "`computes: gradients`"


class Backward(Part):
    """The tensors that come to a backward call besides those of its forward pass."""

    name = "backward"
    summary = "gradients, with one that comes back through the log-sum-exp"
    tokens = (Choice("dlse", (("dlse", True),), False),)
    rows = (("`-bwd-dlse`", "gradients, with one that comes back through the log-sum-exp"),)
    supports = "dlse"
    claims = (False, True)
    words = {
        DOUT: ("dout", "do", "d_out", "grad_out", "grad_output"),
        OUT: (),
        LSE: (),
        DLSE: ("dlse", "grad_lse", "dsoftmax_lse"),
    }
    tensors = {
        DOUT: PartTensor("q", "like_out"),
        OUT: PartTensor("q", "like_out", is_random=False),
        LSE: PartTensor("float32", "per_query", is_random=False),
        DLSE: PartTensor("float32", "per_query"),
    }
    is_after_scores = False

    faults = {
        **dict.fromkeys(
            (
                "delta_missing",
                "delta_of_next_row",
                "dk_scale_missing",
                "ds_one_key_too_wide",
                "dk_of_last_head",
                "dq_last_block_lost",
                "dv_unnormalised",
                "lse_in_base_2",
                "dlse_ignored",
                "cap_slope_missing",
                "dsink_of_next_head",
                "dsink_of_first_batch",
                "dbias_of_first_batch",
                "dbias_scaled",
            ),
            ("max", False),
        ),
        "dk_zeroes_padding": ("rows past", False),
        "clamped_dp": ("hard_gradients", True),
        "dq_flickers": ("repeats", True),
        "gradients_kept_by_shape": ("new_data", False),
    }
    twins = ("twin_right_backward", "twin_right_autograd")
    selftest_shapes = (
        "b2h4s77d64-fp16-causal-kv2-bwd",
        "b1h2s113d64-fp16-cap2-bwd-dlse",
        "b4h2s70d64-bf16-causal_br-var2-bwd",
        "b2h6s77d64-fp16-biashq-sink-bwd",
    )

    # -- the case ---------------------------------------------------------------------------------------------------

    def impossible(self, case: Shape) -> str | None:
        """Gradients are those of 16-bit tensors in memory that the call does not write."""
        if case.computes != "gradients":
            return "only a backward pass has it; write -bwd, or drop -dlse" if case.value_of("dlse") else None
        if case.dtype not in DTYPES:
            return f"gradients are judged in {' and '.join(DTYPES)}; drop -bwd, or write one of these"
        if (layout := case.value_of("layout")) not in LAYOUTS:
            return f"a backward pass is not judged with the layout {layout}; drop -{layout}"
        for field, (plain, text) in WITHOUT.items():
            if case.value_of(field) != plain:
                return f"a cache has no gradient; drop {text}"
        return None

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The gradient that was not judged."""
        return "a gradient of the log-sum-exp" if claim else "no gradient of the log-sum-exp"

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:  # noqa: ARG002  # one of `claims`
        """The gradient of the log-sum-exp."""
        return {"dlse": claim}

    # -- the call ---------------------------------------------------------------------------------------------------

    def arguments(self, case: Shape) -> Mapping[str, Any]:  # noqa: ARG002
        """Its words are tensors."""
        return {}

    def axes(self, word: str, case: Shape) -> tuple[bool, bool, bool, bool] | None:
        """Each row of the output has its own; the results of the forward pass are not drawn."""
        is_drawn = case.computes == "gradients" and (word == DOUT or (word == DLSE and case.value_of("dlse")))
        return (True, True, True, True) if is_drawn else None

    def is_passed(self, word: str, case: Shape) -> bool:
        """The results of the forward pass come with each call."""
        return self.axes(word, case) is not None or (word in RESULTS and case.computes == "gradients")

    def columns(self, word: str, case: Shape) -> int:
        """The elements of a row."""
        return int(case.value_of("head_dim_v")) if word == DOUT else 1

    def fill(self, word: str, numbers: torch.Tensor, generator: torch.Generator) -> None:  # noqa: ARG002  # both alike
        """N(0, 1)."""
        numbers.normal_(generator=generator)

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # any
        """No tensor."""
        return

    def passed_by(self, variant: Any) -> tuple[str, ...]:  # `catalog.variant.Variant`
        """The gradient of the log-sum-exp; `candidate.signature` knows what each backward call passes."""
        return (DLSE,) if self.is_claimed(variant.supports) else ()

    def manifest_problem(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """Gradients have some dtypes, layouts and one policy, and their log-sum-exp has a gradient."""
        supports, computes = variant.supports, variant.computes
        if computes != "gradients":
            claimed = f"supports.dlse is true, but computes is {computes!r}; write {LINE}, or drop dlse"
            return claimed if self.is_claimed(supports) else None
        for key, listed, allowed in (
            ("supports.dtype", supports.dtype, DTYPES),
            ("supports.layout", supports.layout, LAYOUTS),
            ("invariant", variant.invariant, INVARIANCES),
        ):
            if others := [value for value in listed if value not in allowed]:
                judged = f"gradients are judged with {' and '.join(allowed)}"
                return f"{key} has {others[0]!r}, but {judged}; drop it, or `computes: gradients`"
        if caches := [key for key, (plain, _) in WITHOUT.items() if {*supports.values_of(key, (plain,))} != {plain}]:
            return f"supports.{caches[0]} is claimed, but a cache has no gradient; drop it, or `computes: gradients`"
        if variant.tolerance != "same_precision":
            return f"tolerance is {variant.tolerance!r}, but computes is 'gradients'; it must be 'same_precision'"
        return None

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A call passes the gradient of the log-sum-exp if it is claimed."""
        if self.is_claimed(supports) and not call.passes(DLSE):
            return "entry.call does not pass 'dlse', but supports.dlse is true; pass it"
        return None

    def call_given(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """Padding holds what that of q does, and a number for each query has its axes in memory as the kernel's."""
        return _with_padding(inputs, padding_of)

    def call_meant(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """Padding means nothing."""
        return _with_padding(inputs, lambda *_: 0.0)

    def given(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """The gradient of a log-sum-exp in base 2, which is log2 e times as large."""
        return value * math.log(2) if word == DLSE and conventions.get("lse") == "base2" else value

    def meant(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # as above
        """That of the natural one."""
        return value / math.log(2) if word == DLSE and conventions.get("lse") == "base2" else value


def means_gradients(name: str) -> bool:
    """Whether a name in a manifest stands for the backward pass."""
    return re.fullmatch(NAMES, name.lower().replace("-", "_")) is not None


def rows_as_kernels_have(rows: torch.Tensor, conventions: Mapping[str, str]) -> torch.Tensor:
    """The numbers of queries, [batch, heads, seq_q, 1], with the axes in memory as a kernel has them, contiguous."""
    axes = LOG_SUM_EXP.row_axes(conventions)
    return rows[..., 0].permute(axes).contiguous().permute(axes)[..., None]


def _with_padding(inputs: Any, value_of: Any) -> Any:  # `gpu.inputs.Inputs`, a function such as `padding_of`
    """The call with values in all padding of what comes with queries; the call itself if it is no backward call."""
    present = {name: inputs.extra[name] for name in OF_QUERIES if name in inputs.extra}
    if not present:
        return inputs
    lengths = inputs.word("seqlens_q")
    for name, tensor in present.items():
        filled = tensor if lengths is None else behind(tensor, lengths, value_of(inputs, tensor))
        present[name] = rows_as_kernels_have(filled, inputs.conventions) if name in ROWS_OF_QUERIES else filled
    return inputs._replace(extra={**inputs.extra, **present})


PART = Backward()
