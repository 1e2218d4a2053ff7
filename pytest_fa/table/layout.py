"""Lays out the table for the width of a terminal: which columns and rows it shows.

Nothing is cut or wrapped: less important columns are left out of a narrow table, and a name that is too long for its
column gets a line of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pytest_fa.table.rows import NOT_ATTENTION, NOTHING, Row, RowGroup

Style = Literal["", "red", "yellow", "green", "bold"]
GAP = "  "
SHORTEST_NAME = 12  # the least width of the column with the names
MIN_ROWS = 6  # of each shape are shown
MAX_ROWS = 48  # of all shapes together, unless each of them has fewer than MIN_ROWS


class TextLine(NamedTuple):
    """One line for a terminal, and how it is shown there."""

    text: str
    style: Style = ""


class Column(NamedTuple):
    """One column: its header, the field of `Row` with its cells, and whether it is left-aligned."""

    header: str
    field: str
    is_text: bool = False


VARIANT = Column("variant", "variant", is_text=True)
# In the order in which they are shown.
SHAPE_COLUMNS = (
    Column("checks", "checks", is_text=True),
    Column("error / allowed", "error", is_text=True),
    Column("regs", "registers"),
    Column("spill B", "spills"),
    Column("device_us", "device_us"),
    Column("cold_us", "cold_us"),
    Column("call_us", "call_us"),
    Column("peak KiB", "peak"),
    Column("TFLOP/s", "tflops"),
    Column("% peak", "percent_of_peak"),
    Column("GB/s", "gb_per_s"),
    Column("% copy", "percent_of_copy"),
    Column("x baseline", "versus_baseline"),
)
BUILD_COLUMNS = (
    Column("arch", "case", is_text=True),
    Column("result", "checks", is_text=True),
    Column("regs", "registers"),
    Column("spill B", "spills"),
    Column("smem B", "smem"),
    Column("seconds", "build_seconds"),
)
# The columns that are always shown, then the others, the most important first.
ALWAYS = ("case", "checks", "device_us", "versus_baseline")
OPTIONAL = (
    "registers",
    "spills",
    "call_us",
    "percent_of_peak",
    "percent_of_copy",
    "gb_per_s",
    "error",
    "cold_us",
    "peak",
    "tflops",
    "smem",
    "build_seconds",
)
LEGEND = (
    "checks: number of checked runs that passed (ok), or the first failure and how many runs failed.",
    "  2 min ago: the time of a baseline from an earlier run, which was not measured again.",
    "error / allowed: error and limit of the tolerance policy's bound that is closest to its limit.",
    "regs, spill B: registers per thread and spilled bytes of the kernel that ran.",
    "smem B: static shared memory per block, in bytes.  seconds: duration of the compilation.",
    "  shared: one compilation made the builds of several variants.",
    "device_us: median time per call, back to back on the GPU; on the CPU, wall clock of a call.",
    "  !: time not confirmed.  ~: noisy, the calls on the CPU differ by more than 25 %.",
    "cold_us: time of one call after L2 was evicted.  call_us: time that a Python caller waits per call.",
    "peak KiB: device memory that a call needs beside its tensors, with its workspace; its own process reports it.",
    "% peak: TFLOP/s in percent of the measured matrix rate of this GPU (python -m pytest_fa ceilings).",
    "GB/s: bytes of Q, K, V and the output per device_us, where they take longer than the matrix products do.",
    "% copy: GB/s in percent of the measured rate of a copy; above 100 where L2 provides the bytes.",
    "x baseline: device_us divided by that of the fastest correct baseline; below 1 is faster.",
    "  noisy: the two times on the CPU cannot be told apart.  ~2.0: the ratio is known only roughly.",
)
COLD_FIRST = (
    "cold_us is first: device_us reads K and V from L2, where the call before has",
    "left them.  A call that follows other work does not find them there.",
)
LEGEND_HINT = "pytest -v explains the columns and shows every row"


def table_lines(groups: list[RowGroup], width: int, *, every_row: bool = True) -> list[TextLine]:
    """The lines of the table, and of another one for builds if there are any.

    Without `every_row`, a shape with many rows shows its fastest, all that are wrong, and its fastest baseline.
    """
    lines: list[TextLine] = []
    for kind, columns in (("builds", BUILD_COLUMNS), ("shape", SHAPE_COLUMNS)):
        chosen = [group for group in groups if group.kind == kind]
        if chosen:
            lines += [*([TextLine("")] if lines else []), *_lines_of(chosen, columns, width, every_row=every_row)]
    return lines


def _cold_first(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns with `cold_us` before `device_us`, for shapes whose bytes decide and fit into L2."""
    cold = next(column for column in columns if column.field == "cold_us")
    others = [column for column in columns if column is not cold]
    at = next(index for index, column in enumerate(others) if column.field == "device_us")
    return (*others[:at], cold, *others[at:])


def _lines_of(groups: list[RowGroup], columns: tuple[Column, ...], width: int, *, every_row: bool) -> list[TextLine]:
    most = max(MIN_ROWS, MAX_ROWS // len(groups))
    shown = {group.heading: group.rows if every_row else _most_important(group.rows, most) for group in groups}
    rows = [row for group_rows in shown.values() for row in group_rows]
    is_cold_first = any(group.fits_l2 for group in groups)
    columns = _cold_first(columns) if is_cold_first else columns
    indent = "  " if groups[0].heading else ""
    always = (*ALWAYS, "cold_us") if is_cold_first else ALWAYS
    fitting, widths = _fit(rows, columns, always, width - len(indent))
    header = GAP.join(_aligned(column.header, widths[column.field], column) for column in fitting)
    lines = [TextLine((indent + header).rstrip(), "bold")]
    for group in groups:
        lines += [TextLine(group.heading, "bold")] if group.heading else []
        for row in shown[group.heading]:
            style: Style = "red" if row.is_wrong else ""
            lines += [TextLine(indent + text, style) for text in _row_texts(row, fitting, widths)]
        lines += [TextLine(indent + text) for text in _left_out(group.rows, shown[group.heading])]
    return [*lines, *(TextLine(text) for text in COLD_FIRST if is_cold_first)]


def _fit(
    rows: list[Row], columns: tuple[Column, ...], always_shown: tuple[str, ...], width: int
) -> tuple[list[Column], dict[str, int]]:
    """The columns that fit, in the order of the table, and the width of each by its field.

    A column without a figure in any row is left out, except the first ones.
    """
    widths = {
        column.field: max(len(column.header), *(len(getattr(row, column.field)) for row in rows)) for column in columns
    }
    filled = [column for column in columns if any(getattr(row, column.field) != NOTHING for row in rows)]
    always = [column.field for column in filled if column.field in always_shown]
    left = width - sum(widths[field] + len(GAP) for field in always)
    longest_name = max(len(VARIANT.header), *(len(row.variant) for row in rows))
    widths[VARIANT.field] = name_width = min(longest_name, max(left, SHORTEST_NAME))
    left -= name_width
    fields = set(always)
    for field in OPTIONAL:
        needed = widths.get(field, width) + len(GAP)
        if field in [column.field for column in filled] and needed <= left:
            fields.add(field)
            left -= needed
    return [VARIANT, *(column for column in filled if column.field in fields)], widths


def _row_texts(row: Row, columns: list[Column], widths: dict[str, int]) -> list[str]:
    """The line of a row; two lines if its name is too long for its column."""
    cells = [_aligned(getattr(row, column.field), widths[column.field], column) for column in columns]
    if len(row.variant) <= widths[VARIANT.field]:
        return [GAP.join(cells).rstrip()]
    return [row.variant, GAP.join([" " * widths[VARIANT.field], *cells[1:]]).rstrip()]


def _aligned(text: str, width: int, column: Column) -> str:
    return text.ljust(width) if column.is_text else text.rjust(width)


def _most_important(rows: tuple[Row, ...], most: int) -> tuple[Row, ...]:
    """The rows that are shown of many, in their order: what is wrong, the fastest baseline, then the fastest."""
    baseline = next((row for row in rows if row.role == "baseline" and not row.is_wrong), None)
    chosen = {index for index, row in enumerate(rows) if row.is_wrong or row is baseline}
    others = sorted(range(len(rows)), key=lambda index: rows[index].role != "candidate")
    for index in others:
        if len(chosen) < most:
            chosen.add(index)
    return tuple(row for index, row in enumerate(rows) if index in chosen)


def _left_out(rows: tuple[Row, ...], shown: tuple[Row, ...]) -> list[str]:
    """How many rows are left out, and the range of their times."""
    hidden = [row for row in rows if row not in shown]
    times = [row.device_us for row in hidden if row.device_us != NOTHING and row.role not in NOT_ATTENTION]
    span = f", {times[0]} to {times[-1]} us" if len(times) > 1 else f", {times[0]} us" if times else ""
    return [f"... {len(hidden)} more{span}"] if hidden else []
