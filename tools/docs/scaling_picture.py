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
    label_at_end,
    label_of,
    new_figure,
    usable_times,
)
from pytest_fa.table.rows import NOT_ATTENTION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CANDIDATES = 3
SAME = 0.03  # share of a time below which two lines are one
MIN_LENGTHS = 3  # of a line
LABEL_GAP = 0.085  # between two labels, in decades
MAX_STEP = 2  # between two lengths that a line connects

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
        points = {length: _tflops(group[name]) for length, group in family.items() if name in group}
        style, marker = ((0, (5, 3)), "s") if name in REFERENCES else ("solid", "o")
        for part in connected(points):
            rates = [points[length] for length in part]
            axis.plot(part, rates, color=color, linestyle=style, marker=marker, markersize=3.5, linewidth=1.5)
    _label_lines(axis, family, lines)
    rate = ceilings.matmul_tflops.get(first.case.dtype) if ceilings else None
    if rate:
        words, place = f"matrix products: {rate:.0f} TFLOP/s (measured)", (min(family), rate * 1.06)
        axis.axhline(rate, color=QUIET_COLOR, linewidth=1, linestyle=":")
        axis.annotate(words, place, fontsize=8, color=TEXT_COLOR)
        axis.set_ylim(top=rate * 1.5)
    return figure


def connected(lengths: Iterable[int]) -> list[list[int]]:
    """The lengths in groups; a line connects those of a group, and stops before a length that was not measured."""
    groups: list[list[int]] = []
    for length in sorted(lengths):
        if groups and length <= MAX_STEP * groups[-1][-1]:
            groups[-1].append(length)
        else:
            groups.append([length])
    return groups


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
        f"{word} at S = {', '.join(map(str, lengths))} ({span_of([ratios[length] for length in lengths])} x its time)"
        for word, lengths in sides.items()
        if lengths
    ]
    return f"Compared with SDPA, the fastest candidate is {', '.join(parts)}"


def _ratio(group: dict[str, Record]) -> float | None:
    """The time of the fastest candidate divided by that of the fastest SDPA backend; None if one of them is missing."""
    candidates = [device_us_of(each) for each in group.values() if each.role == "candidate"]
    baselines = [device_us_of(each) for each in group.values() if each.variant.startswith("sdpa_")]
    return min(candidates) / min(baselines) if candidates and baselines else None


def span_of(ratios: Sequence[float]) -> str:
    """The least and the largest ratio, or one figure if they are equal."""
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
    """The name of each line behind its last point, with a thin line to it; labels are moved apart."""
    ends = [max(length for length, group in family.items() if name in group) for name in lines]
    heights = [math.log10(_tflops(family[end][name])) for name, end in zip(lines, ends, strict=True)]
    places = apart(heights, LABEL_GAP)
    for (name, color), end, height, place in zip(lines.items(), ends, heights, places, strict=True):
        label_at_end(axis, name, (end, 10**height), (max(family) * 1.13, 10**place), color)
    lengths = _all_lengths(family)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", subs=[2, 5])
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="y", which="minor", labelsize=8, labelcolor=TEXT_COLOR)
    labels = [str(length) if length in family else f"{length}\nnot measured" for length in lengths]
    axis.set_xticks(lengths, labels)
    axis.set_xlim(min(family) / 1.1, max(family) * 1.9)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("sequence length S", fontsize=8, color=TEXT_COLOR)
    axis.set_ylabel("TFLOP/s", fontsize=8, color=TEXT_COLOR)
    axis.grid(axis="y", color=GUIDE_COLOR, linewidth=0.6)


def _all_lengths(family: Family) -> list[int]:
    """The lengths that were measured and, between two that no line connects, the double of each."""
    lengths: list[int] = []
    for length in sorted(family):
        while lengths and length > MAX_STEP * lengths[-1]:
            lengths.append(MAX_STEP * lengths[-1])
        lengths.append(length)
    return lengths
