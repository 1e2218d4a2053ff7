"""The raw samples of each time as a strip of dots in the order in which they were measured, and the GPU's clocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pytest_fa.features.html.shape_tables import shapes_in_order
from pytest_fa.records.agreement import confirmed_by
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Clocks, Speed, Timing
from pytest_fa.table.rows import NOTHING

STRIP_WIDTH, STRIP_HEIGHT = 160, 20  # pixels
CLOCK_WIDTH, CLOCK_HEIGHT = 720, 120
EDGE = 2  # pixels between the outermost dots and the edges of a strip
SPANS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
)  # half the height of a strip, relative to the median
MAX_SAMPLES = 100  # dots in a strip; of more samples, every n-th is drawn
MIN_CLOCKS = 2  # of a line


class SampleStrip(NamedTuple):
    """The samples of one method: the path of the dots, and what half the height of the strip stands for."""

    path: str
    scale: str


class TimedRow(NamedTuple):
    """The samples and clocks of one variant at one shape."""

    variant: str
    device_us: str
    samples: SampleStrip
    cold_samples: SampleStrip | None
    precision: str
    is_confirmed: str
    clocks: str


class StripGroup(NamedTuple):
    """The strips of one shape."""

    shape_id: str
    rows: tuple[TimedRow, ...]


class ClockLine(NamedTuple):
    """One reading over all times of the records: its name with the unit, its path, and its least and largest value."""

    name: str
    path: str
    least: str
    most: str


def strip_groups(records: Iterable[Record]) -> tuple[StripGroup, ...]:
    """The strips of every timed record, by shape."""
    records = list(records)
    groups: dict[str, list[TimedRow]] = {shape: [] for shape in shapes_in_order(records)}
    for record in records:
        if record.case and record.speed:
            groups.setdefault(record.case.shape_id, []).append(_timed_row(record.variant, record.speed))
    return tuple(StripGroup(shape, tuple(rows)) for shape, rows in groups.items() if rows)


def clock_lines(records: Iterable[Record]) -> tuple[ClockLine, ...]:
    """The SM clock, the power and the temperature during each time, in the order of measurement."""
    by_time = sorted((each for each in records if each.speed), key=lambda record: record.measured_at)
    clocks = [each.speed.clocks_during for each in by_time if each.speed and each.speed.clocks_during]
    if len(clocks) < MIN_CLOCKS:
        return ()
    return (
        _clock_line("SM clock, MHz", [float(each.sm_mhz) for each in clocks]),
        _clock_line("power, W", [each.power_watts for each in clocks]),
        _clock_line("temperature, °C", [float(each.temperature_c) for each in clocks]),
    )


def _clock_line(name: str, values: list[float]) -> ClockLine:
    least, most = min(values), max(values)
    span = (most - least) or 1.0
    step = CLOCK_WIDTH / (len(values) - 1)
    points = [
        f"{round(index * step)} {round(CLOCK_HEIGHT - EDGE - (CLOCK_HEIGHT - 2 * EDGE) * (value - least) / span)}"
        for index, value in enumerate(values)
    ]
    return ClockLine(name, f"M{'L'.join(dict.fromkeys(points))}", f"{least:.0f}", f"{most:.0f}")


def _timed_row(variant: str, speed: Speed) -> TimedRow:
    precision = speed.device.precision
    return TimedRow(
        variant=variant,
        device_us=f"{speed.device.median_us:.2f}",
        samples=_strip(speed.device),
        cold_samples=_strip(speed.cold) if speed.cold else None,
        precision=f"± {100 * precision:.2f} %" if precision is not None else NOTHING,
        is_confirmed=confirmed_by(speed),
        clocks=_clock_words(speed.clocks_during or speed.clocks_before, speed.device),
    )


def _strip(timing: Timing) -> SampleStrip:
    """Dots from left to right in the order of measurement; the median is in the middle, samples beyond at the edge."""
    step = -(-len(timing.samples_us) // MAX_SAMPLES)
    shares = [sample / timing.median_us - 1 for sample in timing.samples_us[::step]] if step else []
    widest = max(map(abs, shares), default=0.0)
    span = next((each for each in SPANS if each >= widest), SPANS[-1])
    gap = (STRIP_WIDTH - 2 * EDGE) / max(len(shares) - 1, 1)
    half = STRIP_HEIGHT / 2
    dots = [
        f"M{EDGE + round(index * gap)} {half - (half - EDGE) * max(-1.0, min(1.0, share / span)):.0f}h0"
        for index, share in enumerate(shares)
    ]
    return SampleStrip("".join(dots), f"± {100 * span:g} %")


def _clock_words(clocks: Clocks | None, timing: Timing) -> str:
    if clocks is None:
        return NOTHING
    words = f"{clocks.sm_mhz} MHz, {clocks.power_watts:.0f} W, {clocks.temperature_c} °C"
    return f"{words}, {timing.dropped} samples dropped" if timing.dropped else words
