"""The same call again and again: an output that changes from call to call has a race in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pytest_fa.errors import WrongResult
from pytest_fa.judge.places import first_place
from pytest_fa.report.record import Repeats
from pytest_fa.run.device import synchronize

MOST_SECONDS = 0.5
DEFAULT_REPEATS = 100
LONGEST_STRIDE = 64  # calls between two looks at the clock


def repeat(
    call: Callable[[], torch.Tensor],
    first: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    asked: int | None,
    dirt_missing: str | None,
    watch: Callable[[], object] = lambda: None,
) -> tuple[Repeats, tuple[torch.Tensor, torch.Tensor]]:
    """Compare repeated calls bitwise with `first`; also gives the smallest and the largest value of each element.

    `asked` calls; with None 100, or fewer where they take longer than half a second, but one at least.  NaN equals NaN
    of the same bits.  The comparison stays on the device, so that calls follow one another without a gap; `watch` hears
    before the first call and at every look at the clock.
    """
    want = _bits(first).clone()
    lowest, highest = first.clone(), first.clone()
    ever_differed = torch.zeros_like(want, dtype=torch.bool)
    differing = torch.zeros((), dtype=torch.int64, device=first.device)
    count, next_look, end = 0, 1, time.monotonic() + MOST_SECONDS
    watch()
    while count < (asked or DEFAULT_REPEATS):
        out = call()
        differs = _bits(out) != want
        ever_differed.logical_or_(differs)
        differing += differs.any()
        torch.minimum(lowest, out, out=lowest)  # NaN wins, so that it is judged
        torch.maximum(highest, out, out=highest)
        count += 1
        if count == next_look:
            synchronize(first.device)
            watch()
            if asked is None and time.monotonic() > end:
                break
            next_look = min(2 * next_look, next_look + LONGEST_STRIDE)
    synchronize(first.device)
    found = Repeats(count, int(differing), int(ever_differed.sum()), first_place(ever_differed), dirt_missing)
    return found, (lowest, highest)


def require_identical(repeats: Repeats, *, deterministic: bool) -> None:
    """Raise `WrongResult` where the outputs of a variant that claims to be deterministic differ."""
    if repeats.differing and deterministic:
        raise WrongResult(
            "repeats", f"{repeats.differing} of {repeats.count} repeats differ from the first call bit by bit"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)
