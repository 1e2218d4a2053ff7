"""Mistakes that are fitted to an output: right values in wrong places, and right rows times a factor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fa.attention.mistake import Mistake

MAX_PAIRS = 2**28  # products of two rows are summed over at most this many elements
MAX_MATCHED = 4096  # rows, heads or columns of one axis
LARGEST_REMAINDER = 0.3  # the part of the error's RMS that may remain after a factor was fitted
HALF_BYTES = 2  # of an element of 16 bits
FEW_ROUNDINGS = 4  # factors of rows that are all as close to 1 are written with more digits
MIN_CLAMPED = 2  # elements
FP16_LARGEST = 65504.0
ROUNDED = 0.02  # relative; a value that is this much beyond a limit is so after rounding, too
SMALL_GAIN = 1e-3  # a factor closer to 1 is written with more digits
FEW = 2  # so many exchanged rows are listed


def rearrangements(out: torch.Tensor, right: torch.Tensor, axes: tuple[str, str, str, str]) -> Iterator[Mistake]:
    """Mistakes that move heads, queries or columns of the right output; [batch, heads, seq_q, columns] float64."""
    batch, heads, queries, columns = out.shape
    if sources := _sources(_samples(out.flatten(0, 1)), _samples(right.flatten(0, 1))):
        names = [f"batch {index // heads} head {index % heads}" for index in range(batch * heads)]
        words = _moved("heads", names if batch > 1 else [f"head {index}" for index in range(heads)], sources)
        yield Mistake(
            f"{words}: look at the head and batch index",
            arrange=lambda whole: whole.flatten(0, 1)[sources].view_as(whole),
        )
    for axis, size, what, store in (
        (2, queries, "rows", "the row of each store"),
        (3, columns, "columns", "the column of each thread's fragment"),
    ):
        moved = _sources(*(_samples(tensor.movedim(axis, 0)) for tensor in (out, right)))
        if moved:
            words = _moved(what, [f"{axes[axis]} {index}" for index in range(size)], moved)
            yield Mistake(f"{words}: look at {store}", arrange=partial(_taken, axis=axis, sources=moved))


def _taken(whole: torch.Tensor, axis: int, sources: list[int]) -> torch.Tensor:
    return whole.index_select(axis, torch.tensor(sources, device=whole.device))


def _samples(parts: torch.Tensor) -> torch.Tensor:
    """At most MAX_PAIRS / parts^2 elements of each part, [parts, elements]; they are evenly spread."""
    flat = parts.flatten(1)
    most = max(1, MAX_PAIRS // max(1, len(flat) ** 2))
    step = -(-flat.shape[1] // most)
    return flat[:, :: step | 1 if step > 1 else 1]


def _sources(out: torch.Tensor, right: torch.Tensor) -> list[int]:
    """For each part of the output, [parts, elements], the nearest part of the right output; empty if all are in place.

    A part stays in place unless another one is much nearer.  A part of zeros was not moved, even if another is zero.
    """
    if not 1 < len(out) <= MAX_MATCHED:
        return []
    distance = right.square().sum(1) - 2 * out @ right.T + out.square().sum(1, keepdim=True)  # squared
    distance.clamp_min_(0)
    own = distance.diagonal()
    nearest, sources = distance.min(1)
    places = torch.arange(len(out), device=out.device)
    sources = torch.where((nearest < own / 4) & out.any(1), sources, places)
    moved = sources != places
    if not bool(moved.any()):
        return []
    shifted = (places + ((sources - places) % len(out))[moved].mode().values) % len(out)
    if bool((distance[places, shifted] <= 4 * nearest).all()):  # one shift for all, also where parts are equal
        sources = shifted
    return [int(index) for index in sources]


def _moved(what: str, names: list[str], sources: list[int]) -> str:
    """What moved where, in words: a few places, one distance for all, or an example."""
    moved = [place for place, source in enumerate(sources) if place != source]
    if len(moved) <= FEW:
        return ", ".join(f"{names[place]} holds {names[sources[place]]}" for place in moved)
    distances = {(source - place) % len(sources) for place, source in enumerate(sources)}
    example = f"{names[moved[0]]} holds {names[sources[moved[0]]]}"
    if len(set(sources)) == 1:
        return f"all {what} hold {names[sources[0]]}"
    if len(distances) == 1:
        place = sources.index(0)
        return f"all {what} are shifted: {names[place]} holds {names[0]}"
    if len(set(sources)) < len(sources):
        return f"some {what} are copies of others: {example}"
    return f"the {what} are in another order: {example}"


def scaled(out: torch.Tensor, right: torch.Tensor) -> Mistake | None:
    """The right output times one factor; None if it explains too little of the error."""
    mistake = times_factor(out, right)
    if mistake is None or mistake.arrange is None or not _explains_most(out, right, mistake.arrange(right)):
        return None
    return mistake


def times_factor(out: torch.Tensor, right: torch.Tensor) -> Mistake | None:
    """The right output times the factor that fits best."""
    power = float(right.square().sum())
    if power == 0:
        return None
    gain = float((out * right).sum()) / power
    digits = 4 if abs(gain - 1) > SMALL_GAIN else 6
    words = f"the whole output is {gain:.{digits}g} times what it should be: look at the last division"
    if gain < 0:
        words = f"the whole output is {gain:.4g} times what it should be: a wrong sign, or an earlier call's output"
    return Mistake(words, arrange=lambda whole: gain * whole)


def clamped(out: torch.Tensor, right: torch.Tensor) -> Mistake | None:
    """The right output, clamped at the largest value that was written."""
    most = float(out.abs().max())
    beyond = right.abs() > most * (1 + ROUNDED)
    if int(beyond.sum()) < MIN_CLAMPED or not bool((out.abs()[beyond] == most).all()):
        return None
    of_fp16 = ", the largest fp16" if FP16_LARGEST <= most <= FP16_LARGEST + 32 else ""  # in bf16, it is 65536
    words = f"the output is clamped at {most:.6g}{of_fp16}: look at the conversion of the output"
    return Mistake(words, arrange=lambda whole: whole.clamp(-most, most))


def _explains_most(out: torch.Tensor, right: torch.Tensor, fitted: torch.Tensor) -> bool:
    """Whether little of the error remains after a fit.  A loose policy also accepts fits to errors of another kind."""
    return float((out - fitted).norm()) <= LARGEST_REMAINDER * float((out - right).norm())


def rows_scaled(out: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> Mistake | None:
    """Every row of the right output times a factor of its own; None if it explains too little of the error.

    Factors that are within a few roundings of `dtype`, if that has 16 bits, may come from sums in 16 bits.
    """
    power = right.square().sum(-1, keepdim=True)
    factors = torch.where(power > 0, (out * right).sum(-1, keepdim=True) / power, 1.0)  # [b, h, seq_q, 1]
    if not _explains_most(out, right, factors * right):
        return None
    least, most = float(factors.min()), float(factors.max())
    digits, look = 3, "look at the row sum"
    if dtype.itemsize == HALF_BYTES and max(abs(least - 1), abs(most - 1)) < FEW_ROUNDINGS * torch.finfo(dtype).eps:
        digits, look = 6, "look whether the row sum, or partial sums of P V, are held in 16 bits"
    words = f"each row is a multiple of the right row, {least:.{digits}g} to {most:.{digits}g} times: {look}"
    return Mistake(words, arrange=lambda whole: factors * whole)
