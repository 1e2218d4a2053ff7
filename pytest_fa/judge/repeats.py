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


def repeat(
    call: Callable[[], torch.Tensor],
    first: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    asked: int | None,
    dirt_missing: str | None,
) -> Repeats:
    """Compare repeated calls bitwise with `first`.

    `asked` calls; with None 100, or fewer where they take longer than half a second, but one at least.  NaN equals NaN
    of the same bits.  The comparison stays on the device, so that calls follow one another without a gap.
    """
    want = _bits(first).clone()
    ever_differed = torch.zeros_like(want, dtype=torch.bool)
    differing = torch.zeros((), dtype=torch.int64, device=first.device)

    def once() -> None:
        nonlocal differing
        differs = _bits(call()) != want
        ever_differed.logical_or_(differs)
        differing += differs.any()

    count, next_look, end = 0, 1, time.monotonic() + MOST_SECONDS
    while count < (asked or DEFAULT_REPEATS):
        once()
        count += 1
        if asked is None and count == next_look:
            synchronize(first.device)
            if time.monotonic() > end:
                break
            next_look *= 2
    synchronize(first.device)
    return Repeats(count, int(differing), int(ever_differed.sum()), first_place(ever_differed), dirt_missing)


def require_identical(repeats: Repeats, *, deterministic: bool) -> None:
    """Raise `WrongResult` where the outputs of a variant that claims to be deterministic differ."""
    if repeats.differing and deterministic:
        raise WrongResult(f"{repeats.differing} of {repeats.count} repeats differ from the first call bit by bit")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)
