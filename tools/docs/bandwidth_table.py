"""The Markdown table of shapes that are bound by bytes: cold and hot times, and the share of the copy rate."""

from __future__ import annotations

from pathlib import Path

from pytest_fa.catalog.case import Case
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed
from pytest_fa.table.rows import NOTHING

Timed = dict[str, tuple[Case, Speed]]  # by shape id


def bandwidth_rows(
    folder: Path, ceilings: Ceilings, shapes: list[str], variant: str, against: list[str]
) -> list[list[str]]:
    """The header, and one row for each shape that `variant` was timed on.

    `folder` has the records of a GPU.  The last column divides the `device_us` of `variant` by that of the fastest of
    `against`.  A time that is not confirmed has a `!`.  It has no ratio, and neither has the period of overlapping
    calls.
    """
    own, others = _timed(folder, variant), {name: _timed(folder, name) for name in against}
    times = [f"`{name}` {field}" for name in (variant, *against) for field in ("cold_us", "device_us")]
    header = ["shape", "bytes at the copy rate, us", *times, "GB/s", "% copy", "x fastest other"]
    return [
        header,
        *(
            _row(own[shape], ceilings, [others[name].get(shape) for name in against])
            for shape in shapes
            if shape in own
        ),
    ]


def _timed(folder: Path, variant: str) -> Timed:
    """The times of a variant; of several records of a shape, those of the last one."""
    return {
        record.case.shape_id: (record.case, record.speed)
        for record in _correct(folder, variant)
        if record.case and record.speed
    }


def _correct(folder: Path, variant: str) -> list[Record]:
    return [record for record in read_records(folder / f"{variant}.jsonl") if record.outcome == Outcome.OK]


def _row(own: tuple[Case, Speed], ceilings: Ceilings, others: list[tuple[Case, Speed] | None]) -> list[str]:
    case, speed = own
    device_us = speed.device.median_us
    copy_us = ceilings.copy_us(case)
    other_us = [other[1].device.median_us for other in others if other and _is_comparable(other[1])]
    times = [cell for timed in (own, *others) for cell in _times(timed)]
    rates = [f"{case.bytes_per_call / device_us / 1e3:.0f}", f"{100 * copy_us / device_us:.0f}"]
    return [
        f"`{case.shape_id}`",
        f"{copy_us:.1f}",
        *times,
        *rates,
        f"{device_us / min(other_us):.3f}" if other_us and _is_comparable(speed) else NOTHING,
    ]


def _is_comparable(speed: Speed) -> bool:
    return not is_unconfirmed(speed) and speed.order != "programmatic"


def _times(timed: tuple[Case, Speed] | None) -> list[str]:
    if timed is None:
        return [NOTHING, NOTHING]
    speed = timed[1]
    mark = "!" if is_unconfirmed(speed) else ""
    return [f"{speed.cold.median_us:.2f}" if speed.cold else NOTHING, f"{speed.device.median_us:.2f}{mark}"]
