"""What a case computes: attention, its gradients, or scores alone.

A probe may compute scale * Q K^T, without a softmax and without V.
"""

from __future__ import annotations

from typing import Literal

from pytest_fa.attention.part import Part, Shape
from pytest_fa.attention.token import Choice

Computes = Literal["attention", "scores", "gradients"]
# The names of the four axes of an output.
AXES: dict[Computes, tuple[str, str, str, str]] = {
    "attention": ("batch", "head", "query", "dim"),
    "scores": ("batch", "head", "query", "key"),
    "gradients": ("batch", "head", "row", "dim"),  # of a gradient
}


class WhatIsComputed(Part):
    """Of scores, the output is [batch, heads, seq_q, seq_k]; v is passed and not read."""

    name = "scores"
    summary = "gradients (`-bwd`), or scale * Q K^T alone, for probes"
    tokens = (Choice("computes", (("scores", "scores"), ("bwd", "gradients")), "attention"),)
    rows = (
        ("`-bwd`", "the gradients of q, k and v; pytest-fa adds this part itself for a backward pass"),
        (
            "`-scores`",
            "scale * Q K^T instead of attention, for [probes](manifest.md). pytest-fa adds this part itself",
        ),
    )

    def impossible(self, case: Shape) -> str | None:
        """Scores are computed in the dtype of their inputs."""
        if case.dtype == "e4m3" and case.computes == "scores":
            return "scores are not computed in e4m3; write fp16, bf16 or fp32"
        return None


PART = WhatIsComputed()
