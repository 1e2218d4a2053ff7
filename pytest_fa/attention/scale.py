"""The scale: the factor of the scores, if it is not 1 / sqrt(head_dim)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_fa.attention.part import Convention, Part, Shape
from pytest_fa.attention.token import Float32, as_float32


class ScoreScale(Part):
    """scale * Q K^T.  Each call passes it; an id has it only if it is not SDPA's default."""

    name = "scale"
    summary = "any scale, also zero and negative"
    tokens = (Float32("scale", "scale", "factor", lambda case: 1.0 / math.sqrt(case.head_dim)),)
    rows = (("`-scale0p5`", "scale 0.5; `m` is a minus sign, `p` the decimal point"),)
    claims = (False, True)  # whether it is another one; no manifest claims it
    is_after_scores = False
    conventions = {
        "scale": Convention(
            {
                "given": "the scale of the call is the factor of the scores",
                "times_log2e": "the softmax scale is missing its log2 e, exp2 is in place of exp",
            }
        )
    }

    faults = dict.fromkeys(("scale_default", "scale_of_padded", "scale_twice"), ("max", False))
    selftest_shapes = ("b1h2s113d64-fp16-scale0p2-sink",)  # of kernels that claim sinks: each kernel takes any scale

    def impossible(self, case: Shape) -> str | None:
        """A float32 holds the scale."""
        if math.isinf(as_float32(case.value_of("scale"))):
            return f"scale is {case.value_of('scale'):g}; float32 cannot hold it"
        return None

    def claimed_by(self, case: Shape) -> bool:
        """Whether it is another one than SDPA's."""
        return bool(case.value_of("scale") != self.tokens[0].plain(case))

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:
        """A larger one; nothing changes without one."""
        return self.fields_in_turn(claim, heads)[0]

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # noqa: ARG002
        """A larger one and a smaller one than SDPA's of any head_dim."""
        return ({"scale": 0.2}, {"scale": 0.05}) if claim else ({},)

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # noqa: ARG002  # `catalog.variant.Supports`
        """A kernel with a fixed scale has no other one."""
        scale, usual = case.value_of("scale"), self.tokens[0].plain(case)
        if scale == usual or not supports.fixed_scale:
            return None
        return f"scale is {scale:g}, supports 1/sqrt({case.head_dim}) = {usual:g} (fixed_scale: true)"

    def convention_problem(self, key: str, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """A function must get the scale."""
        call = variant.entry.call
        is_passed = call is None or call.passes("scale")
        return None if is_passed else f"entry.call does not pass 'scale'; pass it, or drop {key}"

    def given(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """The scale for a kernel whose exp2 takes the place of exp."""
        return value / math.log(2) if word == "scale" and conventions.get("scale") == "times_log2e" else value

    def meant(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """The factor of the scores."""
        return value * math.log(2) if word == "scale" and conventions.get("scale") == "times_log2e" else value


PART = ScoreScale()
