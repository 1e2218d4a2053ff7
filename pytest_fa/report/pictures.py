"""Draws the pictures in the records folder: bar charts of the times at each shape, and a roofline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.errors import FaError
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record
from pytest_fa.report.ladder_picture import ladder_picture, without_math

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VARIANT_COLOR, BASELINE_COLOR, OVERHEAD_COLOR = "#2f6db3", "#9aa5b1", "#d0d4d9"


class NothingToShow(FaError):
    """There are no records with times."""


def read_timed(folder: Path) -> list[Record]:
    """Every record with a time in `folder`, which is a `profiles/<gpu>`.

    Raises `NothingToShow` if there is none, `UnreadableRecords` if a line of a file is no record.
    """
    timed = [record for path in sorted(folder.glob("*.jsonl")) for record in read_records(path) if record.speed]
    if not timed:
        raise NothingToShow(f"there are no records with times in {folder}; make some with pytest --fa-save")
    return timed


def draw(folder: Path, ceilings: Ceilings | None) -> list[Path]:
    """Draw pictures of the records into `folder`, and return their paths.

    `bars.svg` shows every shape, `ladder.svg` the candidates at the target shape if any was timed there, `roofline.svg`
    the throughput if the GPU's ceilings are known.

    Raises `NothingToShow` without timed records, `UnreadableRecords` if a line of a file is no record, `ImportError`
    without matplotlib.
    """
    records = read_timed(folder)
    import matplotlib as mpl  # noqa: PLC0415  # from the extra `report`: pip install pytest-fa[report]

    mpl.rcParams["svg.hashsalt"] = "pytest-fa"  # so that the same records give the same file
    pictures = {"bars.svg": _bars(records)}
    if (ladder := ladder_picture(records)) is not None:
        pictures["ladder.svg"] = ladder
    counted = [each for each in records if _case(each).computes == "attention" and _case(each).flops_per_call]
    if ceilings is not None and counted:
        pictures["roofline.svg"] = _roofline(counted, ceilings)
    paths = []
    for name, figure in pictures.items():
        figure.savefig(folder / name, bbox_inches="tight", metadata={"Date": None, "Creator": None})
        paths.append(folder / name)
    return paths


def _bars(records: list[Record]) -> Any:  # noqa: ANN401  # matplotlib's figure
    """One panel for each shape, the fastest variant on top."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    shapes = _by_shape(records)
    figure = Figure(figsize=(8, 0.6 + sum(0.6 + 0.24 * len(group) for group in shapes.values())), layout="constrained")
    heights = [2 + len(group) for group in shapes.values()]
    axes = figure.subplots(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, group in zip(axes, shapes.values(), strict=True):
        _bar_panel(axis, sorted(group, key=_device_us, reverse=True))
    figure.suptitle(f"device_us on {_gpu(records)}: period of back-to-back calls, hot L2", fontsize=10)
    return figure


def _bar_panel(axis: Axes, group: list[Record]) -> None:
    names = [without_math(each.variant) for each in group]
    times = [_device_us(each) for each in group]
    colors = [
        OVERHEAD_COLOR if each.role == "overhead" else BASELINE_COLOR if each.role in COMPANION_ROLES else VARIANT_COLOR
        for each in group
    ]
    bars = axis.barh(names, times, color=colors)
    axis.bar_label(bars, [f"{us:.2f}" for us in times], padding=3, fontsize=7)
    axis.set_title(_case(group[0]).shape_id, fontsize=8, loc="left")
    axis.set_xscale("log")
    axis.set_xlim(right=max(times) * 2)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _roofline(records: list[Record], ceilings: Ceilings) -> Any:  # noqa: ANN401
    """Throughput over arithmetic intensity, below the measured peaks of the device."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    roof = max(ceilings.matmul_tflops.values())
    intensities = [_intensity(_case(each)) for each in records]
    edges = (min(intensities) / 2, max(*intensities, roof * 1e3 / ceilings.copy_gb_per_s) * 2)
    ridge = roof * 1e3 / ceilings.copy_gb_per_s
    slope = [each * ceilings.copy_gb_per_s / 1e3 for each in (edges[0], ridge)]
    axis.plot([edges[0], ridge, edges[1]], [*slope, roof], color="black", linewidth=1)
    axis.annotate(
        f"{roof:.0f} TFLOP/s, {ceilings.copy_gb_per_s:.0f} GB/s (measured)", (edges[0], roof * 1.1), fontsize=7
    )
    for is_baseline, color, label in ((True, BASELINE_COLOR, "SDPA"), (False, VARIANT_COLOR, "variants")):
        group = [each for each in records if each.role != "overhead" and (each.role in COMPANION_ROLES) is is_baseline]
        rates = [_case(each).flops_per_call / _device_us(each) / 1e6 for each in group]
        intensities = [_intensity(_case(each)) for each in group]
        axis.scatter(intensities, rates, s=14, color=color, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte, each tensor touched once")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{_gpu(records)}; hot L2 may lie above the slope", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    return figure


def _by_shape(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: _case(record).flops_per_call):
        groups.setdefault(_case(record).shape_id, []).append(record)
    return groups


def _case(record: Record) -> Case:
    assert record.case is not None  # noqa: S101  # every timed record has a case
    return record.case


def _device_us(record: Record) -> float:
    assert record.speed is not None  # noqa: S101
    return record.speed.device.median_us


def _intensity(case: Case) -> float:
    return case.flops_per_call / case.bytes_per_call


def _gpu(records: list[Record]) -> str:
    return without_math(records[0].environment.gpu or "a CPU")
