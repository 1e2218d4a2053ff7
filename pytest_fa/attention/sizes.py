"""Sizes of heads: a manifest has numbers or a range, a message shows a range as one, and a run judges a few of many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

RANGE = "{from: 8, to: 256, step: 8}"
KEYS = ("from", "to", "step")
MAX_SIZES = 256
LARGEST = 2**16
MIN_RANGE = 5  # fewer sizes are listed in a message
# Of a range, these are judged, and its ends: multiples of 8, 16, 32 and 64 only, of which some are no powers of two.
# Mistakes in copies, swizzles, padding and instruction shapes show on them.
JUDGED = (64, 128, 192, 80, 96, 112, 72, 256)
PAIRED = (128, 72)  # which occur together with each other claim, and in the suite `modifiers`


def read_range(key: str, value: dict[object, object]) -> list[int]:
    """The sizes of a range in a manifest.  Raises `ValueError` with what to write."""
    shown = f"{key} is {_in_yaml(value)}"
    if set(value) != set(KEYS):
        raise ValueError(f"{shown}; a range has `from`, `to` and `step`: write `{RANGE}`")
    first, last, step = (_number(shown, name, value[name]) for name in KEYS)
    if first > last:
        other = {"from": last, "to": first, "step": step}
        raise ValueError(f"{shown}, which begins after its end: write `{_in_yaml(other)}`")
    if (last - first) % step:
        below = last - (last - first) % step
        raise ValueError(
            f"{shown}, but steps of {step} from {first} lead to {below} and {below + step}: write one of both"
        )
    sizes = list(range(first, last + 1, step))
    if len(sizes) > MAX_SIZES:
        raise ValueError(f"{shown}, which has {len(sizes)} sizes; at most {MAX_SIZES} are allowed: use a larger step")
    return sizes


def _number(shown: str, name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"{shown}; `{name}` must be a whole number from 1 to {LARGEST}, as in `{RANGE}`")
    return value


def _in_yaml(value: dict[object, object] | dict[str, int]) -> str:
    return f"{{{', '.join(f'{name}: {size}' for name, size in value.items())}}}"


def shown_sizes(sizes: Sequence[int]) -> str:
    """The sizes in a message: as a range if they are one, else as a list."""
    if not is_range(sizes):
        return ", ".join(map(str, sizes))
    return f"{min(sizes)} to {max(sizes)} in steps of {sorted(sizes)[1] - min(sizes)}"


def is_range(sizes: Sequence[int]) -> bool:
    """Whether there are several sizes with equal distances."""
    ordered = sorted(set(sizes))
    return len(ordered) >= MIN_RANGE and len({after - before for before, after in itertools.pairwise(ordered)}) == 1


def judged_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that a default run judges: all of a list; of a long range its ends, and those that show mistakes."""
    if not is_range(sizes) or len(sizes) <= len(JUDGED):
        return tuple(sizes)
    return tuple(dict.fromkeys([size for size in JUDGED if size in sizes] + [min(sizes), max(sizes)]))


def paired_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of `judged_sizes` that are judged together with each other claim: all of a list, two of a long range."""
    judged = judged_sizes(sizes)
    if len(judged) == len(sizes):
        return judged
    return tuple(size for size in judged if size in PAIRED) or judged[: len(PAIRED)]


def further_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The others of `judged_sizes`, each of which is judged in one case."""
    return tuple(size for size in judged_sizes(sizes) if size not in paired_sizes(sizes))


def in_order(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes, those that are judged first: a case that has an unsupported size gets the first one."""
    return tuple(dict.fromkeys([*judged_sizes(sizes), *sizes]))
