"""The ladder as a picture: the time of every candidate at the target shape, beside SDPA and an empty launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_fa.catalog.suites import TARGET_SHAPE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pytest_fa.records.record import Record

# The lines to compare with: the variant, its label and its colour.
REFERENCES = (
    ("sdpa_cudnn", "SDPA cuDNN", "#c2410c"),
    ("sdpa_flash", "SDPA flash", "#7c3aed"),
    ("noop", "empty launch", "#4b5563"),
)
RUNG_COLOR = "#2563eb"
TEXT_COLOR, GUIDE_COLOR, PAGE_COLOR = (
    "#1f2937",
    "#e5e7eb",
    "#ffffff",
)  # opaque, for light and dark sites


class Time(NamedTuple):
    """The time of one variant at the target shape."""

    variant: str
    device_us: float


def ladder_picture(records: Iterable[Record]) -> Figure | None:
    """A dot for each candidate, the slowest on top, and a line for each of `REFERENCES`; None without a candidate."""
    timed = [record for record in records if record.speed and record.case and record.case.shape_id == TARGET_SHAPE]
    rungs = _times(record for record in timed if record.role == "candidate" and "@" not in record.variant)
    if not rungs:
        return None
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra: pip install pytest-fa[report]

    figure = Figure(figsize=(8, 1.3 + 0.24 * len(rungs)), layout="constrained", facecolor=PAGE_COLOR)
    axis = figure.subplots()
    _draw_rungs(axis, sorted(rungs.values(), key=lambda time: time.device_us))
    _draw_references(axis, _times(timed))
    figure.suptitle(_title(timed[0]), fontsize=10, color=TEXT_COLOR)
    return figure


def without_math(text: str) -> str:
    """The text as matplotlib shows it literally, without taking what is between two `$` as a formula."""
    return text.replace("$", r"\$")


def _title(record: Record) -> str:
    case, gpu = record.case, without_math(record.environment.gpu or "a CPU")
    assert case is not None  # noqa: S101  # timed records have one
    shape = f"batch {case.batch}, {case.heads} heads, sequence {case.seq_q}, head_dim {case.head_dim}, {case.dtype}"
    return f"Time per call in us, log scale: back-to-back calls on {gpu}\n{shape}"


def _times(records: Iterable[Record]) -> dict[str, Time]:
    """The first time of each variant."""
    times: dict[str, Time] = {}
    for record in records:
        if record.speed:
            times.setdefault(record.variant, Time(record.variant, record.speed.device.median_us))
    return times


def _draw_rungs(axis: Axes, rungs: list[Time]) -> None:
    """The fastest at the bottom, each with its figure."""
    positions = range(len(rungs))
    axis.hlines(positions, 0.4, [rung.device_us for rung in rungs], color=GUIDE_COLOR, linewidth=1, zorder=1)
    axis.scatter([rung.device_us for rung in rungs], positions, s=28, color=RUNG_COLOR, zorder=3)
    page = {"facecolor": PAGE_COLOR, "edgecolor": "none", "pad": 1}  # hides the lines behind a figure
    for position, rung in zip(positions, rungs, strict=True):
        place = (rung.device_us * 1.15, position)
        axis.annotate(f"{rung.device_us:.2f}", place, va="center", fontsize=8, color=TEXT_COLOR, bbox=page, zorder=4)
    axis.set_yticks(positions, [without_math(rung.variant) for rung in rungs], fontsize=8, color=TEXT_COLOR)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(0.4, max(rung.device_us for rung in rungs) * 2)
    axis.set_ylim(-0.8, len(rungs) - 0.2)
    axis.tick_params(axis="x", labelsize=8, colors=TEXT_COLOR)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_references(axis: Axes, times: dict[str, Time]) -> None:
    """A vertical line through all rungs for each variant that was timed, and the legend."""
    for name, words, color in REFERENCES:
        if name in times:
            device_us = times[name].device_us
            label = f"{words}: {device_us:.2f}"
            axis.axvline(device_us, label=label, color=color, linewidth=1.3, linestyle=(0, (5, 3)), zorder=2)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right", fontsize=8, facecolor=PAGE_COLOR, labelcolor=TEXT_COLOR)
