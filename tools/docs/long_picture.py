"""TFLOP/s of long sequences: one panel for each head_dim and mask of the suite `long`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_fa.catalog.suites import SUITES
from pytest_fa.records.record import Record
from pytest_fa.table.picture_style import (
    GUIDE_COLOR,
    LINE_COLORS,
    PAGE_COLOR,
    QUIET_COLOR,
    REFERENCES,
    TEXT_COLOR,
    WIDTH,
    apart,
    device_us_of,
    gpu_of,
    label_at_end,
    label_of,
    new_title,
    usable_times,
    without_math,
)
from tools.docs.scaling_picture import connected, span_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADS = 16
MIN_LENGTHS = 2  # of a candidate in a panel
MAX_CANDIDATES = 2
LABEL_GAP = 0.075  # between two labels, as a share of the axis
CASES = tuple(case for case in SUITES["long"] if case.heads == HEADS and case.dtype == "fp16")

Variants = dict[str, dict[int, Record]]  # by variant, by sequence length
Cells = dict[tuple[int, str], Variants]  # by head_dim and mask


def long_picture(records: Iterable[Record]) -> Figure | None:
    """Lines of the fastest candidates, SDPA and FlashAttention-3; None if no candidate was timed at two lengths."""
    times = [each for each in usable_times(records) if each.case and each.case.with_seed(0) in CASES]
    cells = _cells(times)
    candidates = _candidates(cells)[:MAX_CANDIDATES]
    panels = [key for key in cells if any(len(cells[key].get(name, ())) >= MIN_LENGTHS for name in candidates)]
    if not panels:
        return None
    from matplotlib.figure import Figure  # noqa: PLC0415  # from the extra `report`: pip install pytest-fa[report]

    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(WIDTH, 2.7 * rows + 0.4), layout="constrained", facecolor=PAGE_COLOR)
    new_title(figure, long_finding(cells))
    axes = figure.subplots(rows, min(2, len(panels)), squeeze=False).flatten()
    for axis, key in zip(axes, panels, strict=False):
        _draw_panel(axis, key, cells[key], candidates)
    for axis in axes[len(panels) :]:
        axis.remove()
    details = f"TFLOP/s over the sequence length S; {HEADS} heads, fp16; {gpu_of(times)}"
    figure.supxlabel(without_math(details), fontsize=8, color=QUIET_COLOR)
    return figure


def long_finding(cells: Cells) -> str:
    """At how many shapes the fastest candidate is faster than cuDNN and than FlashAttention-3, and by how much."""
    best = _candidates(cells)[0]
    shapes = sum(len(variants.get(best, {})) for variants in cells.values())
    parts = []
    for rival in ("sdpa_cudnn", "flash_attention_3"):
        ratios = _ratios(cells, best, rival)
        if ratios:
            faster = sum(ratio < 1 for ratio in ratios)
            span = f"{span_of(ratios)} x its time"
            missing = f"; no confirmed time at {shapes - len(ratios)}" if len(ratios) < shapes else ""
            parts.append(f"than {label_of(rival)} at {faster} of {shapes} shapes ({span}{missing})")
    return f"{label_of(best)} is faster {' and '.join(parts)}" if parts else f"{label_of(best)} at long sequences"


def _cells(times: Iterable[Record]) -> Cells:
    cells: Cells = {(case.head_dim, case.causal): {} for case in CASES}
    for record in times:
        assert record.case is not None  # noqa: S101  # usable times have a case
        variants = cells[record.case.head_dim, record.case.causal]
        variants.setdefault(record.variant, {}).setdefault(record.case.seq_q, record)
    return cells


def _candidates(cells: Cells) -> list[str]:
    """The candidates, those with the most cells first, and of these the one with the highest mean rate."""
    rates: dict[str, list[float]] = {}
    for variants in cells.values():
        for name, lengths in variants.items():
            if next(iter(lengths.values())).role == "candidate":
                rates.setdefault(name, []).extend(_tflops(record) for record in lengths.values())
    return sorted(rates, key=lambda name: (-len(rates[name]), -statistics.fmean(rates[name])))


def _ratios(cells: Cells, name: str, rival: str) -> list[float]:
    """The time of a variant divided by that of another one, in each cell with both."""
    pairs = [(variants.get(name, {}), variants.get(rival, {})) for variants in cells.values()]
    both = [(own[length], other[length]) for own, other in pairs for length in own if length in other]
    return [device_us_of(own) / device_us_of(other) for own, other in both]


def _draw_panel(axis: Axes, key: tuple[int, str], variants: Variants, candidates: list[str]) -> None:
    """The lines of one head_dim and mask, each with its name at its end."""
    colors = dict(zip(candidates, LINE_COLORS, strict=False)) | {name: color for name, (_, color) in REFERENCES.items()}
    rates = {
        name: {length: _tflops(record) for length, record in sorted(variants[name].items())}
        for name in colors
        if name in variants and name != "noop"
    }
    lengths = sorted({case.seq_q for case in CASES})
    for name, points in rates.items():
        style, marker = ((0, (5, 3)), "s") if name in REFERENCES else ("solid", "o")
        for part in connected(points):
            heights = [points[length] for length in part]
            axis.plot(part, heights, color=colors[name], marker=marker, markersize=3, linestyle=style)
    top = 1.08 * max(max(points.values()) for points in rates.values())
    ends = [list(points.items())[-1] for points in rates.values()]
    places = apart([height for _, height in ends], LABEL_GAP * top)
    shift = max(0.0, max(places) - top)
    for name, end, place in zip(rates, ends, places, strict=True):
        label_at_end(axis, name, end, (lengths[-1] * 1.3, place - shift), colors[name])
    axis.set_title(
        f"head_dim {key[0]}{'' if key[1] == 'none' else ', causal'}", fontsize=8, color=TEXT_COLOR, loc="left"
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    axis.set_ylim(0, top)
    axis.tick_params(labelsize=8, colors=TEXT_COLOR)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=GUIDE_COLOR, linewidth=0.6)


def _tflops(record: Record) -> float:
    assert record.case is not None  # noqa: S101  # usable times have a case
    return record.case.flops_per_call / device_us_of(record) / 1e6
