"""The baseline that the times of one shape are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed


def best_baseline(records: list[Record]) -> Record | None:
    """The record with the least confirmed `device_us` of a baseline without a failure, among those of one shape.

    If other variants were timed on the GPU, a time on the CPU is no baseline.
    """
    failed = {record.variant for record in records if record.outcome != Outcome.OK}
    timed = [(each.speed, each) for each in records if each.speed and not is_unconfirmed(each.speed)]
    on_gpu = any(not speed.is_on_cpu for speed, _ in timed)
    baselines = [
        (speed.device.median_us, record.variant, record)
        for speed, record in timed
        if record.role == "baseline" and record.variant not in failed and not (on_gpu and speed.is_on_cpu)
    ]
    return min(baselines, key=lambda entry: entry[:2])[2] if baselines else None


def comparable(baseline: Record | None, speed: Speed) -> Speed | None:
    """The times of a baseline; None if there is none, or if it ran on another device than `speed`, the CPU or a GPU."""
    times = baseline.speed if baseline else None
    return times if times and times.is_on_cpu == speed.is_on_cpu else None


def compared_baseline(records: Sequence[Record], shape: str) -> Record | None:
    """The best baseline of a shape; for one in e4m3 without a baseline, that of the shapes of `for_comparison`."""
    by_shape: dict[str, list[Record]] = {}
    for record in records:
        if record.case is not None:
            by_shape.setdefault(record.case.shape_id, []).append(record)
    own = by_shape.get(shape, [])
    others = (by_shape.get(other, []) for other in for_comparison(own[0].case if own else None))
    return next(filter(None, map(best_baseline, (own, *others))), None)


def for_comparison(case: Case | None) -> list[str]:
    """For a case in e4m3, the ids of two other shapes, with whose baselines it is compared if it has none.

    A baseline in e4m3 that writes the other output dtype comes first, then SDPA, which lacks e4m3, in the output dtype.
    """
    if case is None or case.dtype != "e4m3":
        return []
    other_output = msgspec.structs.replace(case, fp8_out="fp16" if case.fp8_out == "bf16" else "bf16")
    return [other_output.shape_id, case.with_dtype(case.out_dtype).shape_id]


def baseline_name(baseline: Record, shape: str) -> str:
    """The name of a baseline, with what is different if it was not timed at this shape."""
    case = baseline.case
    if case is None or case.shape_id == shape:
        return baseline.variant
    difference = f"with a {case.out_dtype} output" if case.dtype == "e4m3" else f"in {case.dtype}"
    return f"{baseline.variant} {difference}"


def baseline_title(baseline: Record, shape: str) -> str:
    """A baseline in the heading of a shape; if it has another dtype, also why."""
    case, name = baseline.case, baseline_name(baseline, shape)
    has_shape = case is None or case.shape_id == shape or case.dtype == "e4m3"
    return name if has_shape else f"{name}, because SDPA has no e4m3"
