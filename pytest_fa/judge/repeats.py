"""Repeat a call and compare the outputs bit by bit: an output that changes from call to call indicates a race.

If it changes once, and all later calls agree, the kernel keeps state between calls.

Each call writes an output of its own.  The candidate makes many calls in a row, and the judge compares their outputs
afterwards, in its own process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

import msgspec
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import LIKE
from pytest_fa.attention.rows import Padding
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import Output, bits_of
from pytest_fa.judge.checked_launch import CheckedLaunch
from pytest_fa.judge.error_location import first_index
from pytest_fa.judge.padding import padding_of, rows_of
from pytest_fa.records.checks import WITH_POISON, Repeats
from pytest_fa.wire.commands import Disturbance

MAX_SECONDS = 0.5
DEFAULT_REPEATS = {"cpu": 100, "cuda": 10_000}  # 10,000 calls miss a fault of one call in 2,000 with a chance of 0.7 %
FURTHER_SEED_REPEATS = {"cpu": 10, "cuda": 1_000}  # of a shape that was repeated with other data before
MAX_OUTPUT_BYTES = {"cpu": 2**26, "cuda": 2**29}  # of the outputs of one batch
COMPARED_BYTES = 2**26  # of outputs that are compared at once
MIN_LATER = 3  # equal outputs of the last calls, unlike those before them, that show another reason than a race
BATCH_SECONDS = 0.1  # a batch that takes less time is followed by one of twice as many calls
FAST_SECONDS = BATCH_SECONDS / 8  # a batch that takes less time, by one of eight times as many

# What precedes the first `WITH_POISON` calls, in turn: shared memory full of NaN, most multiprocessors occupied, a cold
# L2, and both.  Of the calls after them, which mostly follow one another without a gap, 10 % start from shared memory
# full of NaN, 2.5 % on a GPU that is busy, and 2.5 % with a cold L2.
EVERY_CALL: tuple[tuple[Disturbance, ...], ...] = (
    ("poison_smem",),
    ("poison_smem", "occupy"),
    ("poison_smem", "clean_l2"),
    ("poison_smem", "clean_l2", "occupy"),
)
_PERIOD = 40  # calls
SOME_CALLS: tuple[tuple[Disturbance, ...], ...] = tuple(
    ("occupy",) if index == 5 else ("clean_l2",) if index == 25 else ("poison_smem",) if index % 10 == 0 else ()  # noqa: PLR2004
    for index in range(_PERIOD)
)


def repeat(
    launch: CheckedLaunch,
    first: Output,
    requested_count: int | None,
    before_launch: Callable[[], object] = lambda: None,
    *,
    keep_farthest: bool = False,
    is_further_seed: bool = False,
) -> tuple[Repeats, Output]:
    """Repeat a checked call and compare each output bitwise with `first`, and its further outputs if there are some.

    Also returns what is farthest from `first` if `keep_farthest` is set; else the output of the last calls if they
    agree and differ from `first`; else `first`.  The number of calls is `requested_count`; if that is None, it is
    10,000 on a GPU and 100 on the CPU (with `is_further_seed` a tenth of it),
    or as many as fit in 0.5 s; at least one.  NaN equals NaN of the same bits.  `before_launch` is called before each
    batch of calls.
    """
    kind = first.out.device.type
    wanted = requested_count or (FURTHER_SEED_REPEATS if is_further_seed else DEFAULT_REPEATS)[kind]
    max_calls = max(1, min(wanted, MAX_OUTPUT_BYTES[kind] // max(1, first.nbytes)))
    outs = Output(launch.out_buffer, launch.more_buffers).map(lambda like: _outputs(launch, like, max_calls))
    comparisons = [
        _Comparison(tensor, padding_of(name, launch.inputs), keep_farthest=keep_farthest)
        for name, tensor in first.named.items()
    ]
    count, size, start = 0, 1, time.monotonic()
    while count < wanted:
        phase_end = WITH_POISON if count < WITH_POISON else wanted
        calls = min(size, phase_end - count, wanted - count, len(outs.out))
        batch = outs.map(lambda each: each[:calls]).poison()  # noqa: B023  # called at once
        before_launch()
        batch_start = time.monotonic()
        launch.repeat(batch, EVERY_CALL if count < WITH_POISON else SOME_CALLS)
        now = time.monotonic()
        for comparison, written in zip(comparisons, batch.tensors, strict=True):
            comparison.add(written)
        count += calls
        if requested_count is None and time.monotonic() - start > MAX_SECONDS:
            break
        size = min(_next_size(size, now - batch_start), len(outs.out))
    of_out, *of_more = comparisons
    if of_out.later_agree and not keep_farthest:
        of_out.farthest = of_out.later
    counts = {name: comparison.differing for name, comparison in zip(first.more, of_more, strict=True)}
    repeats = of_out.result(count, launch.why_no_smem_poison).with_rows_differing(counts)
    farthest = {name: comparison.farthest for name, comparison in zip(first.more, of_more, strict=True)}
    return msgspec.structs.replace(repeats, may_differ=keep_farthest), Output(of_out.farthest, farthest)


def _next_size(size: int, seconds: float) -> int:
    """How many calls the next batch has, after one of `size` calls that took so many seconds."""
    if seconds >= BATCH_SECONDS:
        return max(1, size // 2)
    return 8 * size if seconds < FAST_SECONDS else 2 * size


def require_identical(repeats: Repeats, main: str = "out", may_differ: Collection[str] = ()) -> None:
    """Raise `WrongResult` if an output differs from the first one: `main`, or a further one that must not."""
    if repeats.differing and main not in may_differ:
        raise WrongResult(
            "repeats", f"{repeats.differing} of {repeats.count} repeats differ from the first call bit by bit"
        )
    for name, differing in repeats.rows_differing.items():
        if differing and name not in may_differ:
            of_repeats = f"{differing} of {repeats.count} repeats"
            title = name if name in LIKE else parts.title_of(name)
            raise WrongResult("repeats", f"the {title} of {of_repeats} differs from the first call bit by bit")


class _Comparison:
    """The first output or further output, and how later ones differ from it."""

    def __init__(self, first: torch.Tensor, padding: Padding | None, *, keep_farthest: bool) -> None:
        self._first, self._keep_farthest = first, keep_farthest
        self._undefined = rows_of(padding, first) if padding and padding.rule == "any" else None
        self.farthest = first.clone()
        self._want = bits_of(first).clone()
        self._ever_differed = torch.zeros_like(self._want, dtype=torch.bool)
        self.differing, self._distance = 0, 0.0
        self.later, self._is_one_change = self.farthest, True  # the first output that differs; no other one follows it

    def add(self, outs: torch.Tensor) -> None:
        """Compare outputs, [calls, batch, heads, seq_q, head_dim], as private copies: a candidate may still write."""
        for part in torch.split(outs, max(1, COMPARED_BYTES // max(1, _dense_bytes(self._first)))):
            copies = part.clone() if self._undefined is None else part.where(~self._undefined, self._first)
            differs = bits_of(copies) != self._want
            self._ever_differed.logical_or_(differs.any(0))
            differing = differs.flatten(1).any(1)
            if self.differing or bool(differing.any()):
                self._follow(copies, differing)
            self.differing += int(differing.sum())
            if self._keep_farthest and bool(differing.any()):
                self._keep(copies[differing])

    @property
    def later_agree(self) -> bool:
        """Whether enough calls differ, all of them the last ones, with one output."""
        return self._is_one_change and self.differing >= MIN_LATER

    def _follow(self, copies: torch.Tensor, differing: torch.Tensor) -> None:
        """Compare the outputs from the first one that differs with that one."""
        start = 0
        if not self.differing:
            start = int(differing.nonzero()[0])
            self.later = copies[start].clone()
        self._is_one_change &= bool((bits_of(copies[start:]) == bits_of(self.later)).all())

    def result(self, count: int, why_no_smem_poison: str | None) -> Repeats:
        """The counts as they are recorded."""
        ever_differed = self._ever_differed
        places = int(ever_differed.sum()), first_index(ever_differed)
        return Repeats(count, self.differing, *places, why_no_smem_poison, later_agree=self.later_agree)

    def _keep(self, copies: torch.Tensor) -> None:
        distances = (copies.float() - self._first.float()).abs().nan_to_num(nan=math.inf).flatten(1).amax(1)
        if float(distances.max()) > self._distance:
            self._distance, self.farthest = float(distances.max()), copies[int(distances.argmax())].clone()


def _outputs(launch: CheckedLaunch, like: torch.Tensor, count: int) -> torch.Tensor:
    """`count` outputs in memory that the candidate sees, each laid out like `like`, that of the checked call."""
    size_bytes = count * _dense_bytes(like)
    whole = launch.candidate.lending.allocate(max(1, size_bytes))[:size_bytes].view(like.dtype)
    return whole.as_strided((count, *like.shape), (like.numel(), *like.stride()), whole.storage_offset())


def _dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
