"""The error of every variant, as a fraction of the bound that it comes closest to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.records.record import JUDGED_KINDS, Record
from pytest_fa.table.picture_style import GUIDE_COLOR, LINE_COLORS, TEXT_COLOR, gpu_of, new_figure, without_math

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DTYPE_COLORS = dict(zip(DTYPES, (LINE_COLORS[0], LINE_COLORS[3], LINE_COLORS[2], LINE_COLORS[1]), strict=True))
LIMIT_COLOR = "#c2410c"
MAX_USED = 10.0  # larger fractions, and errors that are not finite, are drawn here


class ClosestBound(NamedTuple):
    """The largest used fraction of a bound over the checks of one variant and dtype; 1.0 is the limit."""

    used: float
    bound: str
    holds: bool
    checks: int


ErrorsOfVariants = dict[str, dict[str, ClosestBound]]  # by variant, then by dtype


def error_picture(records: Iterable[Record]) -> Figure | None:
    """A dot for each variant and dtype; the line at 1 is the limit.  None without a check."""
    all_records = list(records)
    judged = [record for record in all_records if record.check and record.case and record.role != "wrong"]
    errors = closest_bounds(judged)
    if not errors:
        return None
    details = f"largest error of all checks, divided by the limit of its bound (dashed line); {gpu_of(judged)}"
    finding = error_finding(errors, _failed_unseen(all_records))
    figure, axis = new_figure(1.1 + 0.165 * len(errors), finding, details)
    _draw_errors(axis, errors)
    return figure


def closest_bounds(judged: Iterable[Record]) -> ErrorsOfVariants:
    """The bound that each variant comes closest to, or exceeds by most, sorted by the used fraction."""
    errors: ErrorsOfVariants = {}
    for record in judged:
        if record.check and record.case:
            bound, of_variant = record.check.tightest, errors.setdefault(record.variant, {})
            used = MAX_USED if bound.used is None else bound.used
            known = of_variant.get(record.case.dtype)
            checks = known.checks + 1 if known else 1
            if known is None or (not bound.holds, used) > (not known.holds, known.used):
                known = ClosestBound(used, bound.name, bound.holds, checks)
            of_variant[record.case.dtype] = known._replace(checks=checks)
    return dict(sorted(errors.items(), key=lambda item: _worst(item[1]).used))


def _failed_unseen(records: list[Record]) -> list[Record]:
    """The failures without an error that could be drawn, such as those of a kernel that crashed."""
    return [each for each in records if each.kind in JUDGED_KINDS and each.outcome.defect and not each.check]


def error_finding(errors: ErrorsOfVariants, failed_unseen: Sequence[Record] = ()) -> str:
    """How many variants are within their bounds, and which one comes closest; or what failed."""
    wrong = [name for name, of_variant in errors.items() if not all(each.holds for each in of_variant.values())]
    if wrong:
        return f"{len(wrong)} of {len(errors)} variants exceed a bound: {', '.join(sorted(wrong)[:3])}"
    if failed_unseen:
        count, names = len(failed_unseen), ", ".join(sorted({each.variant for each in failed_unseen})[:3])
        return f"{count} result{'s' * (count != 1)} failed without an output to compare: {names}"
    name, of_variant = list(errors.items())[-1]
    closest, checks = _worst(of_variant), sum(each.checks for group in errors.values() for each in group.values())
    share = f"{100 * closest.used:.0f} % of its bound '{closest.bound}'"
    return f"The largest error is {share}: {name} ({checks} checks of {len(errors)} variants)"


def _worst(of_variant: Mapping[str, ClosestBound]) -> ClosestBound:
    return max(of_variant.values(), key=lambda each: (not each.holds, each.used))


def _draw_errors(axis: Axes, errors: ErrorsOfVariants) -> None:
    names = list(errors)
    axis.hlines(range(len(names)), 0, [_worst(errors[name]).used for name in names], color=GUIDE_COLOR, zorder=1)
    for dtype, color in DTYPE_COLORS.items():
        points = [
            (min(of_variant[dtype].used, MAX_USED), place)
            for place, of_variant in enumerate(errors.values())
            if dtype in of_variant
        ]
        if points:
            used, places = zip(*points, strict=True)
            axis.scatter(used, places, s=22, color=color, label=dtype, zorder=3)
    for place, of_variant in enumerate(errors.values()):
        worst = _worst(of_variant)
        text = without_math(f"{worst.bound}{'' if worst.holds else ', exceeded'}")
        end = min(max(each.used for each in of_variant.values()), MAX_USED)
        axis.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=7, color=TEXT_COLOR)
    axis.axvline(1.0, color=LIMIT_COLOR, linewidth=1.3, linestyle=(0, (5, 3)))
    axis.set_yticks(range(len(names)), [without_math(name) for name in names], fontsize=8, color=TEXT_COLOR)
    axis.set_xlim(0, None)
    axis.set_ylim(-0.8, len(names) - 0.2)
    axis.set_xlabel("error / allowed; the word at a dot is the name of its bound", fontsize=8, color=TEXT_COLOR)
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower right", fontsize=8, labelcolor=TEXT_COLOR)
