"""`Rotation`: sets of input and output buffers that timed calls use in turn, the same number for every variant."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.errors import WrongResult
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import LINEAR_IN, Inputs, clone, is_poison, poison, poisoned_output

MOST_BUFFERS = 8


class Rotation:
    """Up to 8 sets of buffers at different addresses; each call uses the next set, and its output is stored.

    All sets hold the same q and k.  v has the opposite sign in every second set, and `flip` negates every v in place.
    The right outputs therefore differ only in their sign, and a result that was cached by address, or that was copied
    from another set, is wrong.  Scores do not read v; for them, k is negated instead.

    All sets together take at most a quarter of the L2 cache, so that calls read their inputs from it.  If one set alone
    is larger than that quarter, `exceeds_l2` is True.
    """

    def __init__(self, case: Case, inputs: Inputs, l2_bytes: int | None) -> None:
        quarter = (l2_bytes or 0) // 4
        self.exceeds_l2 = l2_bytes is not None and case.bytes_per_call > quarter
        count = max(1, min(MOST_BUFFERS, quarter // max(1, case.bytes_per_call)))
        self._negated = LINEAR_IN[case.computes]  # the name of the input that is negated
        self._original = inputs  # the caller's, which no timed call sees
        self.inputs = [clone(inputs) for _ in range(count)]
        self._signs = [1] * count
        self._negate(range(1, count, 2))
        self.out_buffers = [poisoned_output(each, case.computes) for each in self.inputs]  # passed as `out`
        self.last_outputs: list[torch.Tensor] = list(self.out_buffers)  # what the last call on each set returned
        self.begin()

    def __len__(self) -> int:
        return len(self.inputs)

    def begin(self) -> None:
        """Start over with the first set.  Outputs of earlier calls no longer count as timed outputs."""
        self._turn = itertools.cycle(range(len(self.inputs)))
        self._called: set[int] = set()

    def call(self, forward: Forward) -> None:
        """Call `forward` on the next set."""
        turn = next(self._turn)
        self._called.add(turn)
        q, k, v, scale, causal = self.inputs[turn]
        self.last_outputs[turn] = forward(q, k, v, scale=scale, causal=causal, out=self.out_buffers[turn])

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The last output of each set that was used since `begin`, copied, and negated back if its set is negated."""
        return [_signed(self.last_outputs[turn], self._signs[turn]) for turn in sorted(self._called)]

    def flip(self) -> None:
        """Negate every v (for scores: k) in place, so that results cached by address are wrong from now on."""
        self._negate(range(len(self.inputs)))

    def require_untouched(self) -> None:
        """Raise `WrongResult` if a timed call changed an input."""
        for inputs, sign in zip(self.inputs, self._signs, strict=True):
            for name, tensor, original in zip("qkv", inputs[:3], self._original[:3], strict=True):
                if not torch.equal(tensor, original * sign if name == self._negated else original):
                    raise WrongResult("inputs", f"the kernel changed its input {name} while it was timed")

    def _negate(self, indices: Iterable[int]) -> None:
        for index in indices:
            # `.data` bypasses the version counter, which a cache might compare.
            getattr(self.inputs[index], self._negated).data.neg_()
            self._signs[index] = -self._signs[index]

    def turns(self, calls: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, str, torch.Tensor]]:
        """The arguments `(q, k, v, scale, causal, out)` of `calls` calls, prepared outside the timed loop."""
        sets = [(*inputs, out) for inputs, out in zip(self.inputs, self.out_buffers, strict=True)]
        return [sets[turn % len(sets)] for turn in range(calls)]

    def poison(self) -> None:
        """Fill every output with NaN, so that a timed call that computes nothing is found."""
        for out in (*self.out_buffers, *self.last_outputs):
            poison(out)

    def written(self, calls: int) -> list[torch.Tensor]:
        """The outputs that calls with `turns(calls)` wrote; empty for a variant that allocates its outputs."""
        sets = zip(self.out_buffers[:calls], self.last_outputs[:calls], self._signs[:calls], strict=True)
        return [_signed(buffer, sign) for buffer, last_output, sign in sets if buffer is last_output]


def _signed(out: torch.Tensor, sign: int) -> torch.Tensor:
    """An output times its sign; elements that were never written keep their bits."""
    return torch.where(is_poison(out), out, out * sign) if isinstance(out, torch.Tensor) else out * sign
