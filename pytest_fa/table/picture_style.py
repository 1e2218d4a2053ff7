"""What the pictures have in common: colours that fit light and dark pages, titles, labels and the times they draw."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
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
TEXT_COLOR, QUIET_COLOR, GUIDE_COLOR, PAGE_COLOR = (
    "#1f2937",
    "#4b5563",
    "#e5e7eb",
    "#ffffff",
)  # opaque, for light and dark pages
BAR_COLOR = "#2563eb"
# Colours of lines, which differ also for readers with a colour vision deficiency; lines have labels as well.
LINE_COLORS = ("#2563eb", "#0f766e", "#be185d", "#a16207", "#475569", "#15803d")
# The variants that are compared with: their label and their colour.
REFERENCES = {
    "sdpa_cudnn": ("SDPA cuDNN", "#c2410c"),
    "sdpa_flash": ("SDPA flash", "#7c3aed"),
    "flash_attention_3": ("FlashAttention-3", "#0e7490"),
    "noop": ("empty launch", "#4b5563"),
}


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


def device_us_of(record: Record) -> float:
    """The time of a timed record."""
    assert record.speed is not None  # noqa: S101  # the caller has looked
    return record.speed.device.median_us


def label_of(variant: str) -> str:
    """The name of a variant in a picture."""
    return without_math(REFERENCES[variant][0] if variant in REFERENCES else variant)


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
