"""`Mistake`: the attention of a wrong kernel, as the diagnosis simulates it.  It calls methods of the tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

TILES = (16, 32, 64, 128, 256)  # usual numbers of keys per tile
MAX_NAMES = 2  # mistakes that are named if their outputs are the same
LOOK_AT_MASK = "look at the comparison of key and query index"
LOWEST = -sys.float_info.max  # replaces a maximum of -inf: exp(-inf - LOWEST) = 0

# scores [b, h, rows, keys] and hidden [rows, keys] -> P before the division [b, h, rows, keys], divisor [b, h, rows, 1]
Weigh = Callable[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]


class Positions(NamedTuple):
    """The positions that a mask compares: queries [rows, 1] and keys [keys], and the sizes of the case.

    `batches` and `heads` are those of the rows, where these are not all: [batches], [heads].  A query stands `shift`
    keys behind the key of its number, [batch, 1, 1, 1]; None for seq_k - seq_q.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    seq_q: int
    seq_k: int
    heads: torch.Tensor | None = None
    batches: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    def own_keys(self, *, from_first: bool = False) -> torch.Tensor:
        """The key at which each query stands, [rows, 1] or with batch and heads: the last query stands at the last key.

        With `from_first`, the first query stands at the first key.
        """
        if from_first:
            return self.queries
        return self.queries + (self.seq_k - self.seq_q if self.shift is None else self.part_of(self.shift))

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a part's tensor (`part.PartTensor`) for these rows and keys: [batches, heads, rows, keys] or 1.

        A mistake may have more keys or heads than the call; each of these gets the number of the last one.
        """
        places = (self.batches, self.heads, self.queries[:, 0], self.keys)
        for axis, places_of_axis in enumerate(places):
            if places_of_axis is not None and tensor.shape[axis] > 1:
                tensor = tensor.index_select(axis, places_of_axis.clamp_max(tensor.shape[axis] - 1))
        return tensor

    @property
    def nothing_hidden(self) -> torch.Tensor:
        """False for each query and key, [rows, keys]."""
        return self.keys < self.queries.new_zeros(self.queries.shape)


# The keys that each query does not see, [rows, keys] or [batch or 1, heads or 1, rows, keys].
Hide = Callable[[Positions], "torch.Tensor"]
# The scores that have no value, [batch or 1, heads or 1, rows or 1, n], as `Part.sinks`.
Sinks = Callable[[Positions], "torch.Tensor"]
ChangeScores = Callable[["torch.Tensor", Positions], "torch.Tensor"]  # [b, h, rows, keys] before a key is hidden


def softmax(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P = exp(S - max) and its row sum: no mistake."""
    p = exponentials(scores, hidden)
    return p, p.sum(-1, keepdim=True)


def exponentials(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """exp(S - max), zero where a key is hidden."""
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores - scores.amax(-1, keepdim=True).clamp_min(LOWEST)).exp()


def not_divided(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P without the division by its row sum."""
    p = exponentials(scores, hidden)
    return p, p.new_ones((*p.shape[:3], 1))


class Mistake(NamedTuple):
    """One mistake: words for it, and how its output differs from attention.

    `change` replaces inputs (`gpu.inputs.Inputs`).  `score` replaces what the parts of attention do to the scores.
    `sinks` replaces the scores that have no value.  `hide` replaces the mask.  `weigh` replaces the softmax; sinks come
    to it behind the last key.  `shift` replaces that of `Positions`: a number,
    or one for each batch.

    `arrange` moves or changes the elements of the whole output, [batch, heads, seq_q,
    head_dim] or the axes that `change` made of them.
    """

    words: str
    change: Callable[[Any], Any] | None = None
    hide: Hide | None = None
    weigh: Weigh = softmax
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    needs_all_queries: bool = False
    arranges_rows: bool = False  # whether `arrange` changes each row by itself
    score: ChangeScores | None = None
    sinks: Sinks | None = None
    shift: int | torch.Tensor | None = None
    is_score_first: bool = False  # whether `score` comes before what the other parts do to the scores
    is_convention: bool = (
        False  # that the kernel may have and does not declare; other words for its output are left out
    )

    @property
    def moves_elements(self) -> bool:
        """Whether it changes tensors: two directions of one transposition have equal words and unequal outputs."""
        return self.arrange is not None or self.change is not None

    @property
    def is_arranged_truth(self) -> bool:
        """Whether the output is the right one, only arranged in another way."""
        changes = (self.change, self.score, self.hide, self.sinks, self.shift)
        return self.arrange is not None and changes == (None,) * len(changes) and self.weigh is softmax


def last_tiles(keys: int) -> Iterator[tuple[int, str]]:
    """The first key of the last of several tiles, and words for it; sizes of tiles that have the same one share it."""
    sizes: dict[int, list[str]] = {}
    for tile in TILES:
        if tile < keys:
            sizes.setdefault((keys - 1) // tile * tile, []).append(str(tile))
    for start, alike in sizes.items():
        *others, last = alike
        yield start, f"the last tile of {', '.join(others)}{' or ' if others else ''}{last} keys"


def empty_row_mistakes() -> Iterator[Mistake]:
    """What a query that sees no key gets if hidden keys have a finite score."""
    words = "queries that see no key get {}, not zero: look at the value of masked scores"
    yield Mistake(words.format("the mean of V"), weigh=_mean_without_key)
    yield Mistake(words.format("all keys"), weigh=_unmasked_without_key)


def _mean_without_key(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _unmasked_without_key(scores.masked_fill(hidden.all(-1, keepdim=True), 0.0), hidden)


def _unmasked_without_key(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = exponentials(scores, hidden & ~hidden.all(-1, keepdim=True))
    return p, p.sum(-1, keepdim=True)
