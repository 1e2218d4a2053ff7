"""The ladder as a picture: the time of every candidate at one shape, beside SDPA and an empty launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_fa.features.html.main_shape import main_shape
from pytest_fa.records.record import Record
from pytest_fa.table.baselines import best_baseline
from pytest_fa.table.picture_style import (
    BAR_COLOR,
    GUIDE_COLOR,
    PAGE_COLOR,
    QUIET_COLOR,
    REFERENCES,
    TEXT_COLOR,
    device_us_of,
    gpu_of,
    label_of,
    new_figure,
    shape_words,
    usable_times,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def ladder_picture(records: Sequence[Record]) -> Figure | None:
    """A dot for each candidate and each of `REFERENCES`, the fastest on top; None without a candidate.

    The shape is the target shape, or the one where most candidates were timed.
    """
    times = usable_times(records)
    shape = main_shape(times)
    at_shape = {each.variant: each for each in reversed(times) if each.case and each.case.shape_id == shape}
    candidates = sorted((each for each in at_shape.values() if each.role == "candidate"), key=device_us_of)
    if not candidates:
        return None
    rows = sorted([*candidates, *(at_shape[name] for name in REFERENCES if name in at_shape)], key=device_us_of)
    case = candidates[0].case
    assert case is not None  # noqa: S101  # usable times have a case
    details = f"microseconds per call (device_us), log scale; {gpu_of(candidates)}; {shape_words(case)}"
    finding = ladder_finding(candidates, best_baseline(list(at_shape.values())))
    figure, axis = new_figure(1.1 + 0.21 * len(rows), finding, details)
    _draw_rows(axis, rows)
    return figure


def ladder_finding(candidates: Sequence[Record], baseline: Record | None) -> str:
    """How fast the first of the candidates is, beside the fastest baseline and the last of the candidates."""
    fastest, slowest = candidates[0], candidates[-1]
    text = f"{fastest.variant}: {device_us_of(fastest):.2f} us"
    if baseline is not None:
        ratio = device_us_of(fastest) / device_us_of(baseline)
        text += f", {ratio:.2f} x the time of {label_of(baseline.variant)}"
    if slowest is not fastest:
        text += f"; {slowest.variant} takes {device_us_of(slowest) / device_us_of(fastest):.3g} times as long"
    return text


def _draw_rows(axis: Axes, rows: Sequence[Record]) -> None:
    """A dot for each time, with its figure; it is hollow without the judge's clock; references have a colour."""
    times, places = [device_us_of(row) for row in rows], range(len(rows))
    colors = [REFERENCES[row.variant][1] if row.variant in REFERENCES else BAR_COLOR for row in rows]
    least = times[0] / 2
    axis.hlines(places, least, times, color=GUIDE_COLOR, linewidth=1, zorder=1)
    fills = [PAGE_COLOR if _lacks_judge(row) else color for row, color in zip(rows, colors, strict=True)]
    axis.scatter(times, places, s=34, facecolors=fills, edgecolors=colors, zorder=2)
    if PAGE_COLOR in fills:
        axis.set_xlabel("hollow dot: the judge's clock did not measure this time", fontsize=8, color=QUIET_COLOR)
    for place, us, color in zip(places, times, colors, strict=True):
        ink = TEXT_COLOR if color == BAR_COLOR else color
        axis.annotate(f"{us:.2f}", (us, place), (8, 0), textcoords="offset points", va="center", fontsize=8, color=ink)
    axis.set_yticks(places, [label_of(row.variant) for row in rows], fontsize=8)
    for label, color in zip(axis.get_yticklabels(), colors, strict=True):
        label.set(color=TEXT_COLOR if color == BAR_COLOR else color)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(least, times[-1] * 2)
    axis.set_ylim(len(rows) - 0.3, -0.7)  # the first row on top
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _lacks_judge(record: Record) -> bool:
    """Whether the judge's clock did not measure the time, which on the CPU is by that clock alone."""
    return record.speed is not None and record.speed.outside is None and not record.speed.is_on_cpu
