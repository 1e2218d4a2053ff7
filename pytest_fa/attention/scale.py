"""The scale: the factor of the scores, if it is not 1 / sqrt(head_dim)."""

from __future__ import annotations

import math
from typing import Any

from pytest_fa.attention.part import Part, Shape
from pytest_fa.attention.token import Float32, as_float32


class ScoreScale(Part):
    """scale * Q K^T.  Each call passes it; an id has it only if it is not SDPA's default."""

    name = "scale"
    summary = "any scale, also zero and negative"
    tokens = (Float32("scale", "scale", "factor", lambda case: 1.0 / math.sqrt(case.head_dim)),)
    rows = (("`-scale0p5`", "scale 0.5; `m` is a minus sign, `p` the decimal point"),)
    is_after_scores = False

    def impossible(self, case: Shape) -> str | None:
        """A float32 holds the scale."""
        if math.isinf(as_float32(case.value_of("scale"))):
            return f"scale is {case.value_of('scale'):g}; float32 cannot hold it"
        return None

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # noqa: ARG002  # `catalog.variant.Supports`
        """A kernel with a fixed scale has no other one."""
        scale, usual = case.value_of("scale"), self.tokens[0].plain(case)
        if scale == usual or not supports.fixed_scale:
            return None
        return f"scale is {scale:g}, supports 1/sqrt({case.head_dim}) = {usual:g} (fixed_scale: true)"


PART = ScoreScale()
