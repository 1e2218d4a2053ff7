"""The forward passes of timed backward calls.

A backward call gets the output and the log-sum-exp of its own q, k and v.  The judge computes them for a few secret
places of these tensors, each time that it draws new data, and each call is at one of these places.  No two calls of a
series are at the same place with the same dO, up to 2048 calls for each place: all have other gradients.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import torch

from pytest_fa.attention.backward import DLSE, DOUT, RESULTS
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.clocks.shifts import OFFSET_BYTES, STEPS, random_shifts, shifted
from pytest_fa.judge.forward_results import computed_results

# A kernel could keep P of each place.  Up to `MOST_PLACES`, there are so many that P of all of them, in 16 bits, does
# not fit into the L2 cache: then reading it takes longer than computing it anew.
L2_SHARE = 2  # times the L2 that P of all places has
FEWEST_PLACES, MOST_PLACES = 8, 32
P_BYTES = 2
MAX_SCORES = 2**31  # of all places; fewer have room if there are more


class ForwardPasses:
    """The places of what a forward pass reads, and those of its results."""

    def __init__(
        self, like: Inputs, moved: Mapping[str, torch.Tensor], source: random.Random, l2_bytes: int | None = None
    ) -> None:
        read = {name: each for name, each in moved.items() if name not in (DOUT, DLSE, *RESULTS)}
        dense = like.dense()  # sequences behind one another have the scores of each, not of all their rows
        batch, heads, seq_q, _ = dense.q.shape
        scores = max(1, batch * heads * seq_q * dense.k.shape[2])
        wanted = L2_SHARE * (l2_bytes or 0) // (P_BYTES * scores) + 1
        count = max(1, min(max(FEWEST_PLACES, min(MOST_PLACES, wanted)), MAX_SCORES // scores))
        self._source, self._unit = source, OFFSET_BYTES // moved[DOUT].itemsize
        self._steps = {name: _step(like.extra[name]) for name in RESULTS}
        self.shifts = [
            {**random_shifts(read, source), **{name: place * step for name, step in self._steps.items()}}
            for place in range(count)
        ]

    def of_calls(self) -> Iterator[dict[str, int]]:
        """For each call of a series, how many elements after their beginnings its tensors lie."""
        places = list(itertools.product(self.shifts, range(STEPS)))
        while True:
            self._source.shuffle(places)
            yield from ({**shifts, DOUT: step * self._unit} for shifts, step in places)

    def new_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer, one-dimensional, with room for a result at each place."""
        return torch.zeros(len(self.shifts) * _step(tensor), dtype=tensor.dtype, device=tensor.device)

    def compute(self, like: Inputs, buffers: Mapping[str, torch.Tensor]) -> None:
        """Write the results of all places into their buffers, from the data in the others."""
        for shifts in self.shifts:
            call = like.with_parts(
                {
                    name: shifted(_start(buffers[name], each), shifts.get(name, 0)) if name in buffers else each
                    for name, each in like.parts.items()
                }
            )
            results = computed_results(call.dense(), torch.float32).placed()
            for name in RESULTS:
                call.extra[name].copy_(results.extra[name])


def _step(tensor: torch.Tensor) -> int:
    """The distance of two places in elements."""
    unit = OFFSET_BYTES // tensor.itemsize
    return -(-max(1, tensor.numel()) // unit) * unit


def _start(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor at the beginning of its buffer."""
    return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset())
