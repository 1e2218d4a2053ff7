"""The baseline that the times of one shape are compared with."""

from __future__ import annotations

import msgspec

from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed


def best_baseline(records: list[Record]) -> Record | None:
    """The record with the least confirmed `device_us` of a baseline without a failure, among those of one shape.

    If other variants were timed on the GPU, a time on the CPU is no baseline.
    """
    failed = {record.variant for record in records if record.outcome != "ok"}
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


def for_comparison(groups: list[list[Record]], shapes: dict[str, list[list[Record]]]) -> list[list[Record]]:
    """For a shape in e4m3, the records at two other shapes, whose baselines it is compared with if it has none.

    A baseline in e4m3 that writes the other output dtype comes first, then SDPA, which lacks e4m3, in the output dtype.
    """
    case = groups[0][0].case
    if case is None or case.dtype != "e4m3":
        return []
    other_output = msgspec.structs.replace(case, fp8_out="fp16" if case.fp8_out == "bf16" else "bf16")
    others = (other_output, case.with_dtype(case.out_dtype))
    return [[record for group in shapes.get(other.shape_id, []) for record in group] for other in others]


def baseline_title(baseline: Record, shape: str) -> str:
    """A baseline in the heading of a shape, with what it was timed on if that is not this shape."""
    case = baseline.case
    if case is None or case.shape_id == shape:
        return baseline.variant
    if case.dtype == "e4m3":
        return f"{baseline.variant}, which writes {case.out_dtype}"
    return f"{baseline.variant} in {case.dtype}, because SDPA has no e4m3"
