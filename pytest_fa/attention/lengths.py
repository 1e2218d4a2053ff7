"""Lengths: the number of keys, if it is not that of the queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fa.attention.part import Part, Shape
from pytest_fa.attention.token import Number

# Numbers of queries and keys: edges of tiles of 64 and 128, with more keys than the windows in turn have.
IN_TURN = {
    "equal": ((193, 193), (256, 256), (161, 161)),
    "more_keys": ((65, 193), (127, 256), (64, 161), (129, 257)),
    "fewer_keys": ((257, 193), (200, 161), (256, 191)),
    "one_query": ((1, 257), (1, 1055), (1, 192)),
}


class Lengths(Part):
    """S_k unlike S_q; 0 keys are allowed, and give an output of zeros."""

    name = "lengths"
    summary = "there are more or fewer keys than queries"
    tokens = (Number("seq_k", "sk", "keys", like="seq_q"),)
    rows = (("`-sk1024`", "1024 keys"),)
    claims = tuple(IN_TURN)  # no manifest claims them

    def claimed_by(self, case: Shape) -> str:
        """Which of both is longer."""
        if case.seq_q == 1:
            return "one_query"
        return "equal" if case.seq_q == case.seq_k else "more_keys" if case.seq_q < case.seq_k else "fewer_keys"

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:
        """Several tiles, of which the last is cut off."""
        return self.fields_in_turn(claim, heads)[0]

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # noqa: ARG002
        """All that are listed."""
        return tuple({"seq_q": seq_q, "seq_k": seq_k} for seq_q, seq_k in IN_TURN[claim])

    def hunted_claims(self, supports: Any) -> tuple[Any, ...]:  # noqa: ARG002  # `catalog.variant.Supports`
        """None: a random case has random lengths as it is."""
        return ()


PART = Lengths()
