"""e4m3: q, k and v in eight bits, with a factor for each head, and an output in fp16 or bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pytest_fa.attention.part import Part, Shape
from pytest_fa.attention.token import Choice

OutDtype = Literal["fp16", "bf16"]
Data = Literal["normal", "zero_head", "outlier", "tiny"]
SPECIAL: tuple[Data, ...] = ("zero_head", "outlier", "tiny")
DESCALES = ("q_descale", "k_descale", "v_descale")
TOKENS = (
    Choice("fp8_out", (("out_bf16", "bf16"),), "fp16"),
    Choice("data", tuple((kind, kind) for kind in SPECIAL), "normal"),
)

# Those of the suite `history`, heads with special data, an output in bf16, and many keys.
SHAPES = (
    "b1h2s64d64-e4m3",
    "b1h4s128d64-e4m3",
    "b1h8s512d64-e4m3",
    "b2h2s64d64-e4m3",
    "b1h8s512d64-e4m3-out_bf16",
    "b1h8s512d64-e4m3-zero_head",
    "b1h8s512d64-e4m3-outlier",
    "b1h8s512d64-e4m3-tiny",
    "b2h4s77d64-e4m3-causal-kv2-outlier",
    "b2h4s113d64-e4m3-causal-bshd-zero_head",
    "b1h4s1023d64-e4m3-causal-out_bf16-tiny",
    "b1h2s1023d128-e4m3",
    "b1h1s2048d64-e4m3-sk4096",
    "b1h1s256d64-e4m3-sk16384",
)


class Quantised(Part):
    """The value of an element is its e4m3 number times the descale of its head."""

    name = "e4m3"
    summary = "q, k and v in eight bits, with a factor for each head"
    tokens = TOKENS
    rows = (
        (
            "`-out_bf16`, `-zero_head`, `-outlier`, `-tiny`",
            "for [e4m3](../how-to/fp8.md#cases): an output in bf16; heads with special data",
        ),
    )
    shapes = {"fp8": SHAPES}
    words = {f"{name}_descale": (f"{name}_descale", f"descale_{name}") for name in "qkv"}

    def impossible(self, case: Shape) -> str | None:
        """Only e4m3 has another output, and special data."""
        if all(case.value_of(field) == value for field, value in self.fields_for(case.dtype).items()):
            return None
        *most, last = (f"-{text}" for token in TOKENS for text, _ in token.values)
        return f"{', '.join(most)} and {last} need the dtype e4m3"

    def fields_for(self, dtype: str) -> Mapping[str, Any]:
        """Another dtype has neither another output nor special data."""
        return {} if dtype == "e4m3" else {token.field: token.without for token in TOKENS}

    # -- the manifest -----------------------------------------------------------------------------------------------

    def passed_by(self, variant: Any) -> tuple[str, ...]:  # `catalog.variant.Variant`
        """A function that supports e4m3 takes the descales."""
        return DESCALES if "e4m3" in variant.supports.dtype else ()

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A call passes all three descales."""
        for word in DESCALES if "e4m3" in supports.dtype else ():
            if not call.passes(word):
                return (
                    f"entry.call does not pass {word!r}, but supports.dtype has e4m3; add it to arguments or keywords"
                )
        return None

    # -- the call ---------------------------------------------------------------------------------------------------

    def arguments(self, case: Shape) -> Mapping[str, Any]:  # noqa: ARG002
        """The descales are tensors, which come with the quantised data."""
        return {}


def out_dtype_of(dtype: str, fp8_out: str) -> str:
    """The dtype of the output for inputs of a dtype."""
    return fp8_out if dtype == "e4m3" else dtype


PART = Quantised()
