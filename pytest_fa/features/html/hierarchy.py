"""The hierarchy of the page: every variant at one shape, from the fastest to the slowest, and its gap to the limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from pytest_fa.features.html.main_shape import main_shape
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.origin import origin_of
from pytest_fa.records.record import Record
from pytest_fa.records.spread import is_clear_ratio
from pytest_fa.records.timing import Speed
from pytest_fa.table.answer import judged_counts, state_of
from pytest_fa.table.baselines import compared_baseline
from pytest_fa.table.rows import NOT_ATTENTION, NOTHING, UNCLEAR, launched_kernels
from pytest_fa.table.static_code import GROUPS

FIRST_RUNG = "minimal"  # speed-ups are relative to it, or to the slowest candidate if it was not timed
BAR_WIDTH = 200  # pixels
OPENING = (5, 2)  # candidates and baselines in the picture with which the page opens


class LadderStep(NamedTuple):
    """One row of the hierarchy; `place` is that of its dot in pixels, on a log scale."""

    variant: str
    role: str
    place: int
    device_us: str
    versus_first: str
    versus_baseline: str
    tensor_instructions: str
    gap: str
    status: str
    is_wrong: bool


class OpeningBar(NamedTuple):
    """One bar of the picture with which the page opens; `bar` is its length in pixels, from 0 on."""

    variant: str
    role: str
    bar: int
    device_us: str


class Hierarchy(NamedTuple):
    """The steps at one shape; `marks` are the places of the baseline and the limit, in pixels.

    `opening` has the fastest correct candidates and the fastest baselines, the fastest first.
    """

    shape_id: str
    finding: str
    first: str
    baseline: str
    limit: str
    marks: tuple[int, ...]
    steps: tuple[LadderStep, ...]
    opening: tuple[OpeningBar, ...]
    origin: str


class Scale(NamedTuple):
    """A log scale from `least_us` to `most_us`."""

    least_us: float
    most_us: float

    def place(self, device_us: float) -> int:
        """The place of a time in pixels."""
        share = math.log(device_us / self.least_us) / math.log(self.most_us / self.least_us)
        return max(1, round(BAR_WIDTH * share))


class Limit(NamedTuple):
    """The least time that a call can take on a GPU, and what it is the time of."""

    least_us: float
    words: str


class References(NamedTuple):
    """What every time of a hierarchy is compared with."""

    first: Record
    baseline: Record | None
    limit: Limit | None


def hierarchy_of(records: list[Record], ceilings: Ceilings | None) -> Hierarchy | None:
    """The hierarchy at the target shape, or at the one where most candidates were timed; None without a candidate."""
    timed = [record for record in records if record.speed and record.case and record.role not in NOT_ATTENTION]
    shape = main_shape(timed)
    if shape is None:
        return None
    at_shape = _by_time(record for record in timed if record.case and record.case.shape_id == shape)
    first, baseline, limit = references = References(
        _first_of(at_shape), compared_baseline(timed, shape), _limit(at_shape[0], ceilings)
    )
    marks = ([_device_us(baseline)] if baseline else []) + ([limit.least_us] if limit else [])
    ends = [*map(_device_us, at_shape), *marks]
    scale = Scale(min(ends) / 1.3, max(ends) * 1.05)
    by_variant: dict[str, list[Record]] = {}
    for record in records:
        by_variant.setdefault(record.variant, []).append(record)
    right = {record.variant for record in at_shape if _is_usable(record, by_variant[record.variant])}
    return Hierarchy(
        shape_id=shape,
        finding=_finding(at_shape, right, references),
        first=first.variant,
        baseline=baseline.variant if baseline else "",
        limit=f"{limit.least_us:.2f} us, the time of {limit.words}" if limit else "",
        marks=tuple(map(scale.place, marks)),
        steps=tuple(_step(record, by_variant[record.variant], scale, references) for record in at_shape),
        opening=_opening([record for record in at_shape if record.variant in right]),
        origin=origin_of(at_shape),
    )


def _opening(right: list[Record]) -> tuple[OpeningBar, ...]:
    """The bars of the fastest of these records, which are in the order of their times."""
    most_candidates, most_baselines = OPENING
    candidates = [record for record in right if record.role == "candidate"][:most_candidates]
    baselines = [record for record in right if record.role == "baseline"][:most_baselines]
    shown = [record for record in right if record in candidates or record in baselines]
    longest_us = max(map(_device_us, shown), default=1.0)
    return tuple(
        OpeningBar(
            record.variant,
            record.role,
            max(1, round(BAR_WIDTH * _device_us(record) / longest_us)),
            f"{_device_us(record):.2f}",
        )
        for record in shown
    )


def _by_time(records: Iterable[Record]) -> list[Record]:
    """The first record of each variant, the fastest first."""
    by_variant: dict[str, Record] = {}
    for record in records:
        by_variant.setdefault(record.variant, record)
    return sorted(by_variant.values(), key=_device_us)


def _first_of(records: list[Record]) -> Record:
    candidates = [record for record in records if record.role == "candidate"]
    return next((record for record in candidates if record.variant == FIRST_RUNG), candidates[-1])


def _limit(record: Record, ceilings: Ceilings | None) -> Limit | None:
    """The longer of an empty launch and the matrix products at the peak rate; None if these were not measured."""
    if ceilings is None or record.case is None or (record.speed and record.speed.is_on_cpu):
        return None
    products_us = ceilings.least_us(record.case)
    empty = Limit(ceilings.empty_launch_us, "an empty launch")
    rate = ceilings.matmul_tflops.get(record.case.dtype, 0.0)
    products = Limit(products_us, f"the matrix products at the measured {rate:.0f} TFLOP/s")
    limit = max(empty, products)
    return limit if limit.least_us > 0 else None


def _finding(steps: list[Record], right: set[str], references: References) -> str:
    """The fastest right candidate with a confirmed time, beside the first rung, the baseline and the limit."""
    fastest = next((each for each in steps if each.role == "candidate" and each.variant in right), None)
    if fastest is None:
        return "no candidate is correct and has a confirmed time"
    first, baseline, limit = references
    parts = [f"{fastest.variant} takes {_device_us(fastest):.2f} us"]
    for other in (first, baseline):
        if other and other is not fastest:
            ratio = _speed_up(other, fastest)
            words = f"{ratio} x as fast as" if ratio != UNCLEAR else "too noisy to compare with"
            parts.append(f"{words} {other.variant}")
    if limit:
        parts.append(f"{_device_us(fastest) / limit.least_us:.1f} x the limit")
    return ", ".join(parts)


def _is_usable(record: Record, group: list[Record]) -> bool:
    return not state_of(group).is_failure and not is_unconfirmed(_speed(record))


def _step(record: Record, group: list[Record], scale: Scale, references: References) -> LadderStep:
    first, baseline, limit = references
    kernels = launched_kernels([record])
    opcodes = GROUPS["tensor"]
    tensor = sum(kernel.instructions.get(opcode, 0) for kernel in kernels for opcode in opcodes)
    passed, judged = judged_counts(group)
    state = state_of(group)
    return LadderStep(
        variant=record.variant,
        role=record.role,
        place=scale.place(_device_us(record)),
        device_us=f"{_device_us(record):.2f}{'!' if is_unconfirmed(_speed(record)) else ''}",
        versus_first=_speed_up(first, record),
        versus_baseline=_speed_up(baseline, record) if baseline else NOTHING,
        tensor_instructions=str(tensor) if kernels else NOTHING,
        gap=f"{_device_us(record) / limit.least_us:.1f} x" if limit else NOTHING,
        status=f"{state}, {passed}/{judged}" if judged else state,
        is_wrong=state.is_failure,
    )


def _speed_up(slow: Record, fast: Record) -> str:
    ratio = _device_us(slow) / _device_us(fast)
    is_clear = slow is fast or is_clear_ratio(_speed(slow), _speed(fast))
    return f"{ratio:.3g}" if is_clear else UNCLEAR


def _speed(record: Record) -> Speed:
    assert record.speed is not None  # noqa: S101  # only timed records are here
    return record.speed


def _device_us(record: Record) -> float:
    return _speed(record).device.median_us
