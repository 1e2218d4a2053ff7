"""`Problem`: what a call computes, as far as its time depends on it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

L2_MEGABYTES = 50.0
COARSE_FROM, COARSE_KEYS = 1024, 64


class Problem(NamedTuple):
    """A call of attention in 16 bits, without its layout."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    causal: str

    @classmethod
    def of(cls, case: Any) -> Problem:  # noqa: ANN401  # `catalog.case.Case`
        """The problem of a case."""
        return cls(case.batch, case.heads, case.kv_heads, case.seq_q, case.seq_k, case.head_dim, case.causal)

    @property
    def is_masked(self) -> bool:
        """Whether a causal mask hides keys."""
        return self.causal != "none"

    def rows(self) -> int:
        """The queries of all heads that share a key/value head."""
        return self.seq_q * (self.heads // self.kv_heads)

    def visible(self, query: int) -> int:
        """The number of keys that a query sees."""
        if not self.is_masked:
            return self.seq_k
        offset = self.seq_k - self.seq_q if self.causal == "bottom_right" else 0
        return max(0, min(self.seq_k, query + 1 + offset))

    def tile_lengths(self, rows: int) -> list[int]:
        """The keys that each tile of so many queries of one head sees."""
        firsts = range(0, self.seq_q, rows)
        return [self.visible(min(self.seq_q, first + rows) - 1) for first in firsts]

    def megabytes(self) -> float:
        """The size of q, k, v and the output."""
        of_q = self.batch * self.heads * self.seq_q * self.head_dim
        of_k = self.batch * self.kv_heads * self.seq_k * self.head_dim
        return (of_q + 2 * of_k + of_q) * 2 / 1e6

    def memory(self) -> tuple[float, float]:
        """The megabytes of the tensors, and those of them that do not fit into L2."""
        size = self.megabytes()
        return size, max(0.0, size - L2_MEGABYTES)

    def coarse(self) -> Problem:
        """The problem with many keys rounded up, so that a choice is made once while a cache grows by some keys."""
        if self.seq_k <= COARSE_FROM or self.seq_k == self.seq_q:
            return self
        return self._replace(seq_k=math.ceil(self.seq_k / COARSE_KEYS) * COARSE_KEYS)

    def position(self) -> tuple[float, ...]:
        """Where the problem is among others of its kind: at a distance of 1 from one with a number twice as large."""
        sizes = (self.batch * self.kv_heads, self.seq_q, self.seq_k, self.heads / self.kv_heads)
        return tuple(math.log2(max(1, size)) for size in sizes)
