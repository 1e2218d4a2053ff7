"""The same call again and again: an output that changes from call to call has a race in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from pytest_fa.errors import WrongResult
from pytest_fa.judge.places import first_place
from pytest_fa.records.judged import Repeats
from pytest_fa.run.device import synchronize

MOST_SECONDS = 0.5
DEFAULT_REPEATS = 100
LONGEST_STRIDE = 64  # calls between two looks at the clock
QUICK_SECONDS = 0.1  # of a stride: only then the next one is longer


def repeat(
    call: Callable[[], torch.Tensor],
    first: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    asked: int | None,
    smem_poison_missing: str | None,
    watch: Callable[[], object] = lambda: None,
    *,
    keep_farthest: bool = False,
) -> tuple[Repeats, torch.Tensor]:
    """Compare repeated calls bitwise with `first`; also gives the output farthest from it, where that is to be kept.

    `asked` calls; with None 100, or fewer where they take longer than half a second, but one at least.  NaN equals NaN
    of the same bits.  The comparison stays on the device, so that calls follow one another without a gap; `watch` hears
    before the first call and at every look at the clock.
    """
    want, farthest = _bits(first).clone(), first.clone()
    ever_differed = torch.zeros_like(want, dtype=torch.bool)
    differing = torch.zeros((), dtype=torch.int64, device=first.device)
    distance = torch.zeros((), device=first.device)
    count, stride, next_look, start = 0, 1, 1, time.monotonic()
    looked = start
    watch()
    while count < (asked or DEFAULT_REPEATS):
        out = call()
        differs = _bits(out) != want
        ever_differed.logical_or_(differs)
        differing += differs.any()
        if keep_farthest:
            away = (out.float() - first.float()).abs().nan_to_num(nan=math.inf).amax()
            farthest = torch.where(away > distance, out, farthest)
            distance = torch.maximum(away, distance)
        count += 1
        if count == next_look:
            synchronize(first.device)
            watch()
            now = time.monotonic()
            if asked is None and now - start > MOST_SECONDS:
                break
            stride = min(2 * stride, LONGEST_STRIDE) if now - looked < QUICK_SECONDS else 1
            looked, next_look = now, count + stride
    synchronize(first.device)
    found = Repeats(count, int(differing), int(ever_differed.sum()), first_place(ever_differed), smem_poison_missing)
    return found, farthest


def require_identical(repeats: Repeats, *, deterministic: bool) -> None:
    """Raise `WrongResult` where the outputs of a variant that claims to be deterministic differ."""
    if repeats.differing and deterministic:
        raise WrongResult(
            "repeats", f"{repeats.differing} of {repeats.count} repeats differ from the first call bit by bit"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)
