"""A comparison of two sides as text for the terminal, or as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_fa.features.compare.compare import VERDICTS, ComparedRow, Comparison, RowVerdict
from pytest_fa.records.text import printable

HEADERS = (
    "verdict",
    "variant",
    "shape",
    "checks A",
    "checks B",
    "A, us",
    "B, us",
    "B / A",
    "99.5 % interval",
    "code",
    "",
)
RIGHT_ALIGNED = range(3, 9)
MISSING = "-"
ONE_SIDED: dict[RowVerdict, str] = {"gone": "A", "new": "B"}
MAX_VALUES = 4  # of one property of the environment


def comparison_text(comparison: Comparison, *, with_all: bool = False) -> str:
    """The comparison as plain text: the environments, the rows that changed, and the counts, which are the answer.

    Rows of one side, and rows that did not change, are listed only if `with_all`.
    """
    rows = [HEADERS, *(_cells(row) for row in _shown(comparison, with_all=with_all))]
    widths = [max(len(row[index]) for row in rows) for index in range(len(HEADERS))]
    lines = [_aligned(row, widths) for row in rows] if len(rows) > 1 else ["no row changed"]
    notes = _notes(comparison, with_all=with_all)
    return "\n".join([*_head(comparison), "", *lines, "", *notes, answer(comparison)])


def comparison_markdown(comparison: Comparison, *, with_all: bool = False) -> str:
    """The comparison as Markdown: the same content as `comparison_text`."""
    rows = [_cells(row) for row in _shown(comparison, with_all=with_all)]
    rules = ["---:" if index in RIGHT_ALIGNED else "---" for index in range(len(HEADERS))]
    table = [_markdown_row(HEADERS), f"| {' | '.join(rules)} |", *map(_markdown_row, rows)]
    head = [f"- {_escaped(line)}" for line in _head(comparison)]
    notes = [f"- {_escaped(line)}" for line in _notes(comparison, with_all=with_all)]
    parts = ([f"**{_escaped(answer(comparison))}**"], head, table if rows else ["No row changed."], notes)
    return "\n\n".join("\n".join(part) for part in parts if part)


def answer(comparison: Comparison) -> str:
    """The number of rows of each verdict, in one line."""
    counts = [f"{comparison.counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in comparison.counts]
    return f"A -> B: {', '.join(counts)}"


def _shown(comparison: Comparison, *, with_all: bool) -> list[ComparedRow]:
    return [row for row in comparison.rows if with_all or row.verdict not in (*ONE_SIDED, "same")]


def _notes(comparison: Comparison, *, with_all: bool) -> list[str]:
    """Where the figures come from, the variants of only one side, times that do not count, and what cannot be read.

    Variants of only one side are in the table if it lists all.
    """
    notes = []
    for verdict, side in ONE_SIDED.items() if not with_all else ():
        variants = Counter(row.variant for row in comparison.rows if row.verdict == verdict)
        shapes = [f"{name} ({count})" for name, count in variants.items()]
        notes += [f"only in {side}: {', '.join(shapes)}; --all lists them"] if shapes else []
    origins = [
        f"{side}: {origin}" for side, origin in (("A", comparison.origin_a), ("B", comparison.origin_b)) if origin
    ]
    return [*origins, *notes, *comparison.hidden, *comparison.complaints]


def _head(comparison: Comparison) -> list[str]:
    """The names of the sides, and one line for each difference of the environments."""
    differences = [f"differs: {each.name}: {_values(each.a)} -> {_values(each.b)}" for each in comparison.differences]
    return [f"A: {comparison.a}", f"B: {comparison.b}", *(differences or ["the environments are the same"])]


def _values(values: Sequence[str]) -> str:
    shown = ", ".join(values[:MAX_VALUES]) or "none"
    return shown if len(values) <= MAX_VALUES else f"{shown} and {len(values) - MAX_VALUES} more"


def _cells(row: ComparedRow) -> tuple[str, ...]:
    interval = f"{row.low:.3f} to {row.high:.3f}" if row.low is not None and row.high is not None else MISSING
    codes = {True: "changed", False: "same", None: MISSING}
    return (
        row.verdict,
        row.variant,
        row.shape_id,
        *(f"{checks[0]}/{checks[1]}" if checks else MISSING for checks in (row.checks_a, row.checks_b)),
        *(f"{value:.2f}" if value is not None else MISSING for value in (row.device_us_a, row.device_us_b)),
        f"{row.ratio:.3f}" if row.ratio is not None else MISSING,
        interval,
        codes[row.is_code_changed],
        printable(row.reason),
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.rjust(width) if index in RIGHT_ALIGNED else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    """The text without characters that Markdown or HTML would interpret."""
    for mark in "\\|`*[]":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("&", "&amp;").replace("<", "&lt;")
