"""The ladder as a picture: the time of every candidate at one shape, beside SDPA and an empty launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_fa.features.html.main_shape import main_shape
from pytest_fa.records.record import Record
from pytest_fa.table.baselines import best_baseline
from pytest_fa.table.picture_style import (
    BAR_COLOR,
    PAGE_COLOR,
    REFERENCES,
    TEXT_COLOR,
    device_us_of,
    gpu_of,
    label_of,
    new_figure,
    shape_words,
    usable_times,
    without_math,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def ladder_picture(records: Sequence[Record]) -> Figure | None:
    """A bar for each candidate, the slowest on top, and a line for each of `REFERENCES`; None without a candidate.

    The shape is the target shape, or the one where most candidates were timed.
    """
    times = usable_times(records)
    shape = main_shape(times)
    at_shape = {each.variant: each for each in reversed(times) if each.case and each.case.shape_id == shape}
    rungs = sorted((each for each in at_shape.values() if each.role == "candidate"), key=device_us_of)
    if not rungs:
        return None
    case = rungs[0].case
    assert case is not None  # noqa: S101  # usable times have a case
    details = f"device_us, log scale: time per call, back to back on {gpu_of(rungs)}; {shape_words(case)}"
    finding = ladder_finding(rungs, best_baseline(list(at_shape.values())))
    figure, axis = new_figure(1.3 + 0.24 * len(rungs), finding, details)
    _draw_rungs(axis, rungs)
    _draw_references(axis, at_shape)
    return figure


def ladder_finding(rungs: Sequence[Record], baseline: Record | None) -> str:
    """How fast the first of the rungs is, beside the fastest baseline and the last of the rungs."""
    fastest, slowest = rungs[0], rungs[-1]
    text = f"{fastest.variant}: {device_us_of(fastest):.2f} us"
    if baseline is not None:
        ratio = device_us_of(fastest) / device_us_of(baseline)
        text += f", {ratio:.2f} x the time of {label_of(baseline.variant)}"
    if slowest is not fastest:
        text += f"; {slowest.variant} takes {device_us_of(slowest) / device_us_of(fastest):.3g} times as long"
    return text


def _draw_rungs(axis: Axes, rungs: Sequence[Record]) -> None:
    """The fastest at the bottom, each with its figure."""
    times, positions = [device_us_of(rung) for rung in rungs], range(len(rungs))
    least = min(0.4, times[0] / 2)
    axis.barh(positions, [us - least for us in times], left=least, height=0.62, color=BAR_COLOR, zorder=2)
    page = {"facecolor": PAGE_COLOR, "edgecolor": "none", "pad": 1}  # hides the lines behind a figure
    for position, us in zip(positions, times, strict=True):
        axis.annotate(
            f"{us:.2f}", (us * 1.05, position), va="center", fontsize=8, color=TEXT_COLOR, bbox=page, zorder=4
        )
    axis.set_yticks(positions, [without_math(rung.variant) for rung in rungs], fontsize=8, color=TEXT_COLOR)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(least, times[-1] * 2)
    axis.set_ylim(-0.8, len(rungs) - 0.2)
    axis.set_xlabel("us per call", fontsize=8, color=TEXT_COLOR)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _draw_references(axis: Axes, times: dict[str, Record]) -> None:
    """A vertical line through all rungs for each reference that was timed, and the legend."""
    for name, (words, color) in REFERENCES.items():
        if name in times:
            device_us = device_us_of(times[name])
            label = f"{words}: {device_us:.2f}"
            axis.axvline(device_us, label=label, color=color, linewidth=1.3, linestyle=(0, (5, 3)), zorder=3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right", fontsize=8, facecolor=PAGE_COLOR, labelcolor=TEXT_COLOR)
