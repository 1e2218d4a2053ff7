"""What the pictures have in common: colours for light and dark pages, titles, labels and the times they draw."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fa.attention import parts
from pytest_fa.catalog.case import Case
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE_CHARACTERS = 92  # of one line
WIDTH = 8.0  # inches, which are 800 pixels in a README
TEXT_COLOR, QUIET_COLOR, GUIDE_COLOR, PAGE_COLOR = "#1f2937", "#4b5563", "#e5e7eb", "#ffffff"
BAR_COLOR = "#2563eb"
# Colours of lines, which differ also for readers with a colour vision deficiency; lines have labels as well.
LINE_COLORS = ("#2563eb", "#0f766e", "#be185d", "#a16207", "#475569", "#15803d")
# The variants that are compared with: their label and their colour.
REFERENCES = {
    "sdpa_cudnn": ("SDPA cuDNN", "#c2410c"),
    "sdpa_flash": ("SDPA flash", "#7c3aed"),
    "flash_attention_3": ("FlashAttention-3", "#111827"),
    "noop": ("empty launch", "#6b7280"),
}
# Each colour on a dark page.  The black and the grey are the defaults of matplotlib's text, axes and legends.
DARK_COLORS = {
    TEXT_COLOR: "#e6edf3",
    QUIET_COLOR: "#9198a1",
    GUIDE_COLOR: "#30363d",
    PAGE_COLOR: "#0d1117",
    "#2563eb": "#58a6ff",
    "#0f766e": "#2dd4bf",
    "#be185d": "#f472b6",
    "#a16207": "#e3b341",
    "#475569": "#94a3b8",
    "#15803d": "#4ade80",
    "#c2410c": "#fb923c",
    "#7c3aed": "#a78bfa",
    "#111827": "#f8fafc",
    "#6b7280": "#8b949e",
    "#000000": "#c9d1d9",
    "#cccccc": "#484f58",
}
FONTS = "'DejaVu Sans',Verdana,Arial,sans-serif"


def usable_times(records: Iterable[Record]) -> list[Record]:
    """The records with a time that is not known to be wrong, of variants without a failure at that shape.

    Variants with other defines, such as `ws_p2@STAGES=3`, are omitted.
    """
    records = list(records)
    failed = {(each.variant, each.case.shape_id) for each in records if each.case and each.outcome.is_failure}
    return [
        each
        for each in records
        if each.speed
        and each.case
        and "@" not in each.variant
        and not is_unconfirmed(each.speed)
        and (each.variant, each.case.shape_id) not in failed
    ]


def new_figure(height: float, finding: str, details: str) -> tuple[Figure, Axes]:
    """A figure with one axis; the finding is its title, the details stand below it in small print."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # from the extra `report`: pip install pytest-fa[report]

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=PAGE_COLOR)
    new_title(figure, finding)
    axis = figure.subplots()
    axis.set_title(without_math(details), fontsize=8, color=QUIET_COLOR, loc="left")
    axis.tick_params(labelsize=8, colors=TEXT_COLOR)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def new_title(figure: Figure, finding: str) -> None:
    """Write the finding as the title of a figure."""
    title = textwrap.fill(without_math(finding), TITLE_CHARACTERS)
    figure.suptitle(title, fontsize=10, color=TEXT_COLOR, fontweight="bold", x=0.01, ha="left")


def save_svg(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG that follows the colour scheme of the reader; equal figures give equal files.

    Text stays text, which can be searched.
    """
    import matplotlib as mpl  # noqa: PLC0415  # from the extra `report`: pip install pytest-fa[report]

    written, title = io.StringIO(), " ".join(figure.get_suptitle().replace(r"\$", "$").split())
    with mpl.rc_context({"svg.hashsalt": "pytest-fa", "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    path.write_text(follow_color_scheme(written.getvalue()), encoding="utf-8")


def follow_color_scheme(svg: str) -> str:
    """Replace the colours in matplotlib's SVG by classes, which have one colour on light and one on dark pages."""
    used: set[str] = {"fill: #000000"}  # of text without a colour
    styled = re.sub(r' style="([^"]*)"', lambda match: _with_classes(match[1], used), svg)
    light = "".join(f".{_class_of(item)}{{{item}}}" for item in sorted(used))
    dark = "".join(
        f".{_class_of(item)}{{{item.replace(color, DARK_COLORS[color])}}}"
        for item in sorted(used)
        for color in [item.partition(": ")[2]]
    )
    text = f"text{{font-family:{FONTS};fill:#000000}}"
    dark_text = f"text{{fill:{DARK_COLORS['#000000']}}}"
    rules = f"{text}{light}@media(prefers-color-scheme:dark){{{dark_text}{dark}}}"
    return styled.replace("</style>", f"{rules}</style>", 1)


def _with_classes(style: str, used: set[str]) -> str:
    """The attributes of an element in place of its style; its colours are added to `used`."""
    items = re.sub(r"; font-family: [^;]*|(?<=px) 'DejaVu Sans'[^;]*", "", style).split("; ")
    colors = [item for item in items if item.partition(": ")[2] in DARK_COLORS]
    used.update(colors)
    rest = "; ".join(item for item in items if item not in colors)
    classes = " ".join(map(_class_of, colors))
    return (f' class="{classes}"' if classes else "") + (f' style="{rest}"' if rest else "")


def _class_of(item: str) -> str:
    """The class of a declaration, such as `f1f2937` of `fill: #1f2937`."""
    name, _, color = item.partition(": #")
    return f"{name[0]}{color}"


def device_us_of(record: Record) -> float:
    """The time of a timed record."""
    assert record.speed is not None  # noqa: S101  # the caller has looked
    return record.speed.device.median_us


def label_of(variant: str) -> str:
    """The name of a variant in a picture."""
    return without_math(REFERENCES[variant][0] if variant in REFERENCES else variant)


def label_at_end(axis: Axes, variant: str, end: tuple[float, float], place: tuple[float, float], color: str) -> None:
    """Write the name of a variant at a place beside the axis, connected with the end of its line."""
    axis.annotate(
        label_of(variant),
        end,
        place,
        va="center",
        fontsize=8,
        color=color,
        annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2},
    )


def shape_words(case: Case) -> str:
    """A shape in words."""
    of_parts = "".join(part.in_words(case) for part in parts.PARTS)
    size = f"batch {case.batch}, {case.heads} heads, sequence {case.seq_q}, head_dim {case.head_dim}"
    return f"{size}, {case.dtype}{of_parts}"


def gpu_of(records: Sequence[Record]) -> str:
    """The GPU of the records, or the CPU."""
    return records[0].environment.gpu or records[0].environment.cpu


def apart(places: Sequence[float], gap: float) -> list[float]:
    """The places, moved so that adjacent ones are at least `gap` apart; their mean and their order stay the same."""
    moved: dict[int, float] = {}
    last: float | None = None
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        last = moved[index] = places[index] if last is None else max(places[index], last + gap)
    shift = (sum(places) - sum(moved.values())) / max(len(places), 1)
    return [moved[index] + shift for index in range(len(places))]


def without_math(text: str) -> str:
    """The text as matplotlib shows it literally, without taking what is between two `$` as a formula."""
    return text.replace("$", r"\$")
