"""The picture of a sweep: its history, and which values the fast configurations have (parallel coordinates)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes  # from the extra `report`, as is all of this module
from matplotlib.figure import Figure

from pytest_fa.features.sweep.trial_result import SweepEnd, SweepTrial
from pytest_fa.table.picture_style import (
    BAR_COLOR,
    GUIDE_COLOR,
    LINE_COLORS,
    PAGE_COLOR,
    QUIET_COLOR,
    TEXT_COLOR,
    WIDTH,
    new_title,
    save_svg,
    without_math,
)

HEIGHT = 6.4
BEST_SHARE = 0.1  # of the configurations, which are drawn in colour
LOST_COLOR = LINE_COLORS[2]


def draw_sweep(facts: Mapping[str, Any], trials: Sequence[SweepTrial], end: SweepEnd | None, path: Path) -> None:
    """Write the picture as SVG.  It has no date and no random ids, so that equal studies give equal files."""
    save_svg(sweep_picture(facts, trials, end), path)


def sweep_picture(facts: Mapping[str, Any], trials: Sequence[SweepTrial], end: SweepEnd | None) -> Figure:
    """The history above, the parallel coordinates below; the title says how the sweep ended."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained", facecolor=PAGE_COLOR)
    new_title(figure, f"{facts.get('variant', '')}: {_finding(end)}")
    history, values = figure.subplots(2, 1)
    for axis in (history, values):
        axis.tick_params(labelsize=8, colors=TEXT_COLOR)
        axis.spines[["top", "right"]].set_visible(False)
    _draw_history(history, trials)
    _draw_values(values, facts, trials)
    return figure


def _finding(end: SweepEnd | None) -> str:
    if end is None:
        return "the sweep has not ended"
    if end.winner is None:
        return end.reason.partition(":")[0]
    worst = max(each.ratio for each in end.ratios)
    return f"{', '.join(f'{name}={value}' for name, value in end.winner.items())} takes {worst:.3f} x the parent's time"


def _draw_history(axis: Axes, trials: Sequence[SweepTrial]) -> None:
    """A dot for each timed configuration, a cross for each that could not win, and a line for the best one so far."""
    timed = _ratios(trials)
    lost = [trial.number for trial in trials if trial.is_counted and trial.result and not trial.is_right]
    numbers, ratios = [trial.number for trial, _ in timed], [ratio for _, ratio in timed]
    axis.plot(numbers, ratios, "o", color=BAR_COLOR, markersize=3, label="timed")
    axis.step(numbers, list(itertools.accumulate(ratios, min)), color=QUIET_COLOR, where="post", label="best so far")
    top = max(ratios, default=1.0)
    axis.plot(lost, [top] * len(lost), "x", color=LOST_COLOR, markersize=4, label="wrong, over a limit, or not timed")
    axis.axhline(1.0, color=GUIDE_COLOR, linewidth=1)
    axis.set_xlabel("trial", fontsize=8, color=TEXT_COLOR)
    axis.set_ylabel("time / time of the parent", fontsize=8, color=TEXT_COLOR)
    axis.legend(fontsize=7, frameon=False)


def _draw_values(axis: Axes, facts: Mapping[str, Any], trials: Sequence[SweepTrial]) -> None:
    """A line for each timed configuration through its values; the fastest tenth is in colour."""
    values: dict[str, list[Any]] = facts.get("values", {})
    timed = sorted(_ratios(trials), key=lambda pair: -pair[1])
    best = max(1, round(BEST_SHARE * len(timed))) if timed else 0
    for place, (trial, _) in enumerate(timed):
        is_best = place >= len(timed) - best
        heights = [values[name].index(trial.point[name]) / max(1, len(values[name]) - 1) for name in values]
        color, width = (BAR_COLOR, 1.4) if is_best else (GUIDE_COLOR, 0.8)
        axis.plot(range(len(values)), heights, color=color, linewidth=width, zorder=2 if is_best else 1)
    for column, (_, listed) in enumerate(values.items()):
        for row, value in enumerate(listed):
            height = row / max(1, len(listed) - 1)
            label, corner = without_math(str(value)), (column, height)
            axis.annotate(label, corner, (4, 3), textcoords="offset points", fontsize=7, color=TEXT_COLOR, zorder=3)
    axis.set_xticks(range(len(values)), [without_math(name) for name in values])
    axis.set_yticks([])
    title = f"values of the {len(timed)} timed configurations; the fastest {best} in blue"
    axis.set_title(title, fontsize=8, color=QUIET_COLOR, loc="left")


def _ratios(trials: Sequence[SweepTrial]) -> list[tuple[SweepTrial, float]]:
    timed = [(trial, trial.result.log_ratio) for trial in trials if trial.result]
    return [(trial, math.exp(ratio)) for trial, ratio in timed if ratio is not None]
