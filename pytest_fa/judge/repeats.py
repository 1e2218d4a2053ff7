"""Repeat a call and compare the outputs bit by bit: an output that changes from call to call indicates a race."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from pytest_fa.errors import WrongResult
from pytest_fa.judge.places import first_place
from pytest_fa.records.judged import Repeats
from pytest_fa.run.device import synchronize
from pytest_fa.run.inputs import bits_of

MOST_SECONDS = 0.5
DEFAULT_REPEATS = 100
LONGEST_STRIDE = 64  # calls between two synchronizations, at which the elapsed time is checked
QUICK_SECONDS = 0.1  # a stride that takes less time is followed by one of twice as many calls


def repeat(
    call: Callable[[], torch.Tensor],
    first: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    requested_count: int | None,
    why_no_smem_poison: str | None,
    before_launch: Callable[[], object] = lambda: None,
    *,
    keep_farthest: bool = False,
) -> tuple[Repeats, torch.Tensor]:
    """Repeat `call` and compare each output bitwise with `first`.

    Also returns the output that is farthest from `first` if `keep_farthest` is set, else `first`.  The number of calls
    is `requested_count`; if that is None, 100 or as many as fit in 0.5 s, at least one.  NaN equals NaN of the same
    bits.  The comparison runs on the device, so that calls follow one another without a gap.  `before_launch` is called
    before the first call and after each synchronization.
    """
    want, farthest = bits_of(first).clone(), first.clone()
    ever_differed = torch.zeros_like(want, dtype=torch.bool)
    differing = torch.zeros((), dtype=torch.int64, device=first.device)
    distance = torch.zeros((), device=first.device)
    count, stride, next_check, start = 0, 1, 1, time.monotonic()
    last_check_time = start
    before_launch()
    while count < (requested_count or DEFAULT_REPEATS):
        out = call()
        differs = bits_of(out) != want
        ever_differed.logical_or_(differs)
        differing += differs.any()
        if keep_farthest:
            difference = (out.float() - first.float()).abs().nan_to_num(nan=math.inf).amax()
            farthest = torch.where(difference > distance, out, farthest)
            distance = torch.maximum(difference, distance)
        count += 1
        if count == next_check:
            synchronize(first.device)
            before_launch()
            now = time.monotonic()
            if requested_count is None and now - start > MOST_SECONDS:
                break
            stride = min(2 * stride, LONGEST_STRIDE) if now - last_check_time < QUICK_SECONDS else 1
            last_check_time, next_check = now, count + stride
    synchronize(first.device)
    repeats = Repeats(count, int(differing), int(ever_differed.sum()), first_place(ever_differed), why_no_smem_poison)
    return repeats, farthest


def require_identical(repeats: Repeats) -> None:
    """Raise `WrongResult` if an output differs from the first one."""
    if repeats.differing:
        raise WrongResult(
            "repeats", f"{repeats.differing} of {repeats.count} repeats differ from the first call bit by bit"
        )
