"""TFLOP/s over the sequence length: where which kernel is the fastest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.suites import TARGET_SHAPE
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.record import Record
from pytest_fa.table.picture_style import (
    GUIDE_COLOR,
    LINE_COLORS,
    QUIET_COLOR,
    REFERENCES,
    TEXT_COLOR,
    apart,
    device_us_of,
    gpu_of,
    label_of,
    new_figure,
    usable_times,
)
from pytest_fa.table.rows import NOT_ATTENTION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CANDIDATES = 5
SAME = 0.03  # share of a time below which two lines are one
MIN_LENGTHS = 3  # of a line
LABEL_GAP = 0.09  # between two labels, in decades

Family = dict[int, dict[str, Record]]  # by sequence length, then by variant


def scaling_picture(records: Iterable[Record], ceilings: Ceilings | None) -> Figure | None:
    """A line for each of the fastest candidates and for SDPA; None if no shape was timed at three lengths or more."""
    times = [each for each in usable_times(records) if each.role not in NOT_ATTENTION and each.role != "probe"]
    family = _largest_family(times)
    if len(family) < MIN_LENGTHS:
        return None
    lines = _lines_of(family)
    first = next(iter(next(iter(family.values())).values()))
    assert first.case is not None  # noqa: S101  # usable times have a case
    figure, axis = new_figure(4.4, scaling_finding(family), _details(first.case, times))
    for name, color in lines.items():
        points = [(length, _tflops(group[name])) for length, group in family.items() if name in group]
        style = (0, (5, 3)) if name in REFERENCES else "solid"
        axis.plot(*zip(*points, strict=True), color=color, linestyle=style, marker="o", markersize=3.5, linewidth=1.5)
    _label_lines(axis, family, lines)
    rate = ceilings.matmul_tflops.get(first.case.dtype) if ceilings else None
    if rate:
        axis.axhline(rate, color=QUIET_COLOR, linewidth=1, linestyle=":")
        axis.annotate(f"matrix products: {rate:.0f} TFLOP/s (measured)", (min(family), rate * 1.06), fontsize=8)
    return figure


def scaling_finding(family: Family) -> str:
    """At which lengths the fastest candidate is faster than the fastest SDPA backend, and by how much."""
    ratios = {length: ratio for length, group in family.items() if (ratio := _ratio(group)) is not None}
    if not ratios:
        best = max((each for group in family.values() for each in group.values()), key=_tflops)
        return f"{label_of(best.variant)} reaches {_tflops(best):.0f} TFLOP/s"
    sides = {
        "faster": [length for length, ratio in ratios.items() if ratio < 1],
        "slower": [length for length, ratio in ratios.items() if ratio >= 1],
    }
    parts = [
        f"{word} at S = {', '.join(map(str, lengths))} ({_range([ratios[length] for length in lengths])} x its time)"
        for word, lengths in sides.items()
        if lengths
    ]
    return f"Compared with SDPA, the fastest candidate is {', '.join(parts)}"


def _ratio(group: dict[str, Record]) -> float | None:
    """The time of the fastest candidate divided by that of the fastest SDPA backend; None if one of them is missing."""
    candidates = [device_us_of(each) for each in group.values() if each.role == "candidate"]
    baselines = [device_us_of(each) for each in group.values() if each.variant.startswith("sdpa_")]
    return min(candidates) / min(baselines) if candidates and baselines else None


def _range(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == most else f"{least} to {most}"


def _details(case: Case, times: Sequence[Record]) -> str:
    mask = "" if case.causal == "none" else ", causal"
    shape = f"batch {case.batch}, {case.heads} heads, head_dim {case.head_dim}, {case.dtype}{mask}"
    return f"TFLOP/s over the sequence length S, both on log scales; {shape}; {gpu_of(times)}"


def _largest_family(times: Iterable[Record]) -> Family:
    """The times of the shapes that differ only in the length; of those with the most lengths, the target shape's."""
    families: dict[tuple[object, ...], Family] = {}
    for record in times:
        case = record.case
        if case and case.seq_q == case.seq_k and case.computes == "attention":
            key = (case.batch, case.heads, case.kv_heads, case.head_dim, case.dtype, case.causal, case.layout)
            families.setdefault(key, {}).setdefault(case.seq_q, {}).setdefault(record.variant, record)
    family = max(families.values(), key=lambda family: (len(family), _has_target(family)), default={})
    return dict(sorted(family.items()))


def _has_target(family: Family) -> bool:
    return any(each.case and each.case.shape_id == TARGET_SHAPE for group in family.values() for each in group.values())


def _lines_of(family: Family) -> dict[str, str]:
    """The colour of each line: the candidates that are the fastest at the most lengths, and SDPA."""
    counts = Counter(name for group in family.values() for name in group)
    lines: list[str] = []
    for name in sorted(_candidates(family), key=lambda name: _rank(family, name)):
        if counts[name] >= MIN_LENGTHS and not any(_is_covered(family, name, line) for line in lines):
            lines.append(name)
    colors = dict(zip(lines[:MAX_CANDIDATES], LINE_COLORS, strict=False))
    baselines = {name: color for name, (_, color) in REFERENCES.items() if counts[name] >= MIN_LENGTHS}
    return colors | baselines


def _candidates(family: Family) -> list[str]:
    return list(dict.fromkeys(each.variant for group in family.values() for each in group.values() if _is_own(each)))


def _is_own(record: Record) -> bool:
    return record.role == "candidate"


def _rank(family: Family, name: str) -> tuple[int, float]:
    """The number of lengths where a candidate is not the fastest, and the mean ratio to the fastest one."""
    ratios = [
        device_us_of(group[name]) / min(device_us_of(each) for each in group.values() if _is_own(each))
        for group in family.values()
        if name in group
    ]
    return len(family) - ratios.count(1.0), sum(ratios) / len(ratios)


def _is_covered(family: Family, name: str, line: str) -> bool:
    """Whether the line of a variant would lie on another one."""
    pairs = [(group[name], group.get(line)) for group in family.values() if name in group]
    return all(other and abs(device_us_of(own) / device_us_of(other) - 1) < SAME for own, other in pairs)


def _tflops(record: Record) -> float:
    assert record.case is not None  # noqa: S101  # usable times have a case
    return record.case.flops_per_call / device_us_of(record) / 1e6


def _label_lines(axis: Axes, family: Family, lines: dict[str, str]) -> None:
    """The name of each line behind its last point; labels that would overlap are moved apart."""
    ends = [max(length for length, group in family.items() if name in group) for name in lines]
    heights = [math.log10(_tflops(family[end][name])) for name, end in zip(lines, ends, strict=True)]
    for (name, color), height in zip(lines.items(), apart(heights, LABEL_GAP), strict=True):
        place = (max(family) * 1.06, 10**height)
        axis.annotate(label_of(name), place, fontsize=8, va="center", color=color, annotation_clip=False)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.set_xticks(sorted(family), [str(length) for length in sorted(family)])
    axis.set_xlim(min(family) / 1.1, max(family) * 2.1)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("sequence length S", fontsize=8, color=TEXT_COLOR)
    axis.set_ylabel("TFLOP/s", fontsize=8, color=TEXT_COLOR)
    axis.grid(axis="y", color=GUIDE_COLOR, linewidth=0.6)
