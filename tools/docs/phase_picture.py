"""Time by phase: how much faster a kernel is without each of its phases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pytest_fa.records.record import Record
from pytest_fa.table.picture_style import (
    LINE_COLORS,
    TEXT_COLOR,
    device_us_of,
    gpu_of,
    new_figure,
    usable_times,
    without_math,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_HEIGHT = 0.8  # of all bars of a phase together


class PhaseTimes(NamedTuple):
    """The time of a variant at one shape, and how much less it takes without each phase, in microseconds."""

    shape_id: str
    whole_us: float
    saved_us: dict[str, float]


def phase_picture(records: Iterable[Record]) -> Figure | None:
    """A bar for each phase and shape of the variant with the most ablations; None without an ablation."""
    times = usable_times(records)
    variant, shapes = phase_times(times)
    if not shapes:
        return None
    phases = sorted(shapes[0].saved_us, key=lambda phase: shapes[0].saved_us[phase])
    details = f"us per call that a phase adds, measured by omitting it; phases overlap; {gpu_of(times)}"
    height = 1.4 + 0.24 * len(phases) * len(shapes)
    figure, axis = new_figure(height, phase_finding(variant, shapes[0]), details)
    _draw_phases(axis, phases, shapes)
    return figure


def phase_times(times: Iterable[Record]) -> tuple[str, list[PhaseTimes]]:
    """The variant with the most ablations and its phases at each shape, the longest time first."""
    whole: dict[tuple[str, str], float] = {}
    ablated: dict[tuple[str, str], dict[str, float]] = {}
    for record in times:
        if record.case:
            shape = record.case.shape_id
            whole.setdefault((record.variant, shape), device_us_of(record))
            if record.ablation:
                ablated.setdefault((record.ablation.parent, shape), {})[record.ablation.phase] = device_us_of(record)
    known = {key: phases for key, phases in ablated.items() if key in whole}
    if not known:
        return "", []
    variant = max(known, key=lambda key: len(known[key]))[0]
    shapes = [
        PhaseTimes(key[1], whole[key], {phase: whole[key] - us for phase, us in phases.items()})
        for key, phases in known.items()
        if key[0] == variant
    ]
    return variant, sorted(shapes, key=lambda shape: -shape.whole_us)


def phase_finding(variant: str, shape: PhaseTimes) -> str:
    """The phase that adds the most time."""
    phase = max(shape.saved_us, key=lambda name: shape.saved_us[name])
    share = 100 * shape.saved_us[phase] / shape.whole_us
    text = f"{phase} adds the most: {shape.saved_us[phase]:.2f} of {shape.whole_us:.2f} us, {share:.0f} %"
    return f"{variant}, {shape.shape_id}: {text}"


def _draw_phases(axis: Axes, phases: list[str], shapes: list[PhaseTimes]) -> None:
    height = BAR_HEIGHT / len(shapes)
    for index, shape in enumerate(shapes):
        present = [(place, shape.saved_us[phase]) for place, phase in enumerate(phases) if phase in shape.saved_us]
        places = [place + BAR_HEIGHT / 2 - height * (index + 0.5) for place, _ in present]
        label = f"{shape.shape_id}: {shape.whole_us:.2f} us"
        values = [round(saved_us, 2) + 0.0 for _, saved_us in present]  # a phase that adds nothing has no bar
        bars = axis.barh(places, values, height=height * 0.9, label=label, color=LINE_COLORS[index % len(LINE_COLORS)])
        axis.bar_label(bars, [f"{us:.2f}" for us in values], padding=3, fontsize=8, color=TEXT_COLOR)
    axis.set_yticks(range(len(phases)), [without_math(phase) for phase in phases], fontsize=8, color=TEXT_COLOR)
    axis.set_xlabel("us", fontsize=8, color=TEXT_COLOR)
    axis.margins(x=0.12)
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower right", fontsize=8, labelcolor=TEXT_COLOR)
