"""Scores alone: a probe may compute scale * Q K^T, without a softmax and without V."""

from __future__ import annotations

from typing import Literal

from pytest_fa.attention.part import Part, Shape
from pytest_fa.attention.token import Choice

Computes = Literal["attention", "scores"]
# The names of the four axes of an output.
AXES: dict[Computes, tuple[str, str, str, str]] = {
    "attention": ("batch", "head", "query", "dim"),
    "scores": ("batch", "head", "query", "key"),
}


class ScoresAlone(Part):
    """The output is [batch, heads, seq_q, seq_k]; v is passed and not read."""

    name = "scores"
    summary = "scale * Q K^T alone, for probes"
    tokens = (Choice("computes", (("scores", "scores"),), "attention"),)
    rows = (
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


PART = ScoresAlone()
