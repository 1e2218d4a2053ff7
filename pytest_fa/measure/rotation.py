"""Buffers that take turns: inputs and kept outputs, the same number for every variant."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.errors import WrongResult
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import LINEAR_IN, Inputs, clone, poisoned_output

MOST_BUFFERS = 8


class Rotation:
    """A few sets of data at different addresses; each call uses the next set and keeps its output.

    All sets hold the same q and k; v has the opposite sign in every second set, and `flip` turns all signs where the
    data lie.  So the right output is the same but for its sign, and one that was kept from another set, or from before
    the flip, is wrong.  Scores read no v: there it is k whose sign is turned.

    Together they stay within a quarter of L2, so that every call finds its data there; where one set alone is larger,
    `exceeds_l2` says so.  An output that a variant allocates itself is kept as long as one it was given.
    """

    def __init__(self, case: Case, inputs: Inputs, l2_bytes: int | None) -> None:
        quarter = (l2_bytes or 0) // 4
        self.exceeds_l2 = l2_bytes is not None and case.bytes_per_call > quarter
        count = max(1, min(MOST_BUFFERS, quarter // max(1, case.bytes_per_call)))
        self._turned = LINEAR_IN[case.computes]
        self._plain = inputs  # the caller's, which no timed call sees
        self.inputs = [clone(inputs) for _ in range(count)]
        self._signs = [1] * count
        self._turn_signs(range(1, count, 2))
        self.given = [poisoned_output(each, case.computes) for each in self.inputs]
        self.kept: list[torch.Tensor] = list(self.given)
        self.begin()

    def __len__(self) -> int:
        return len(self.inputs)

    def begin(self) -> None:
        """Start over with the first set; what was called before does not count as timed."""
        self._turn = itertools.cycle(range(len(self.inputs)))
        self._called: set[int] = set()

    def call(self, forward: Forward) -> None:
        """One call on the next set."""
        turn = next(self._turn)
        self._called.add(turn)
        q, k, v, scale, causal = self.inputs[turn]
        self.kept[turn] = forward(q, k, v, scale=scale, causal=causal, out=self.given[turn])

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What the calls since `begin` gave, each copied with its set's sign taken off."""
        return [self.kept[turn] * self._signs[turn] for turn in sorted(self._called)]

    def flip(self) -> None:
        """Turn the sign of every v, or k, in place: whoever keeps results by address gives old ones from here on."""
        self._turn_signs(range(len(self.inputs)))

    def require_untouched(self) -> None:
        """Raise `WrongResult` where a timed call changed an input."""
        for mine, sign in zip(self.inputs, self._signs, strict=True):
            for name, tensor, plain in zip("qkv", mine[:3], self._plain[:3], strict=True):
                if not torch.equal(tensor, plain * sign if name == self._turned else plain):
                    raise WrongResult("inputs", f"the kernel changed its input {name} while it was timed")

    def _turn_signs(self, turns: Iterable[int]) -> None:
        for turn in turns:
            getattr(self.inputs[turn], self._turned).data.neg_()  # past the version counter, which a cache might watch
            self._signs[turn] = -self._signs[turn]

    def turns(self, calls: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, str, torch.Tensor]]:
        """The arguments `(q, k, v, scale, causal, out)` of so many calls, made before a clock runs."""
        sets = [(*inputs, out) for inputs, out in zip(self.inputs, self.given, strict=True)]
        return [sets[turn % len(sets)] for turn in range(calls)]

    def poison(self) -> None:
        """Fill every output with NaN again, given or returned: a timed call that computes nothing shows."""
        for out in (*self.given, *self.kept):
            out.fill_(float("nan"))

    def written(self, calls: int) -> list[torch.Tensor]:
        """The given outputs that `turns(calls)` writes; none for a variant that returns tensors of its own."""
        sets = zip(self.given[:calls], self.kept[:calls], self._signs[:calls], strict=True)
        return [given * sign for given, kept, sign in sets if given is kept]
