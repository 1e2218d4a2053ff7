"""`Mistake`: the attention of a wrong kernel, as the diagnosis simulates it.  It calls methods of the tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

TILES = (16, 32, 64, 128, 256)  # usual numbers of keys per tile
LOOK_AT_MASK = "look at the comparison of key and query index"
_LOWEST = -sys.float_info.max  # replaces a maximum of -inf: exp(-inf - _LOWEST) = 0

# scores [b, h, rows, keys] and hidden [rows, keys] -> P before the division [b, h, rows, keys], divisor [b, h, rows, 1]
Weigh = Callable[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]


class Positions(NamedTuple):
    """The positions that a mask compares: queries [rows, 1] and keys [keys], and the sizes of the case.

    `heads` are those of the rows, where a mistake depends on them: [heads].
    """

    queries: torch.Tensor
    keys: torch.Tensor
    seq_q: int
    seq_k: int
    heads: torch.Tensor | None = None

    @property
    def nothing_hidden(self) -> torch.Tensor:
        """False for each query and key, [rows, keys]."""
        return self.keys < self.queries.new_zeros(self.queries.shape)


Hide = Callable[[Positions], "torch.Tensor"]  # the keys that each query does not see, [rows, keys]
ChangeScores = Callable[["torch.Tensor", Positions], "torch.Tensor"]  # [b, h, rows, keys] before a key is hidden


def softmax(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P = exp(S - max) and its row sum: no mistake."""
    p = exponentials(scores, hidden)
    return p, p.sum(-1, keepdim=True)


def exponentials(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """exp(S - max), zero where a key is hidden."""
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores - scores.amax(-1, keepdim=True).clamp_min(_LOWEST)).exp()


class Mistake(NamedTuple):
    """One mistake: words for it, and how its output differs from attention.

    `change` replaces inputs (`gpu.inputs.Inputs`).  `score` replaces what the parts of attention do to the scores.
    `hide` replaces the mask.  `weigh` replaces the softmax.  `arrange` moves or changes the elements of the whole
    output, [batch, heads, seq_q, head_dim] or the axes that `change` made of them.
    """

    words: str
    change: Callable[[Any], Any] | None = None
    hide: Hide | None = None
    weigh: Weigh = softmax
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    needs_all_queries: bool = False
    score: ChangeScores | None = None

    @property
    def moves_elements(self) -> bool:
        """Whether it changes tensors: two directions of one transposition have equal words and unequal outputs."""
        return self.arrange is not None or self.change is not None

    @property
    def is_arranged_truth(self) -> bool:
        """Whether the output is the right one, only arranged in another way."""
        changes = (self.change, self.score, self.hide)
        return self.arrange is not None and changes == (None, None, None) and self.weigh is softmax
