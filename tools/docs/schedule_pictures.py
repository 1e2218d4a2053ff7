"""Draws who holds which tile when, for the kernels in which several warpgroups or blocks work together.

python -m tools.docs.schedule_pictures docs/pictures

A lane is a warpgroup, a thread or a copy engine.  Its boxes stand in the order in which they run; widths are about the
share of the time and not measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_fa.table.picture_style import (
    GUIDE_COLOR,
    LINE_COLORS,
    PAGE_COLOR,
    QUIET_COLOR,
    TEXT_COLOR,
    new_figure,
    save_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a box does, with its colour.
LOAD, PRODUCT, SOFTMAX, MERGE, STORE = "load", "product", "softmax", "merge", "store"
COLORS = dict(zip((LOAD, PRODUCT, SOFTMAX, MERGE, STORE), LINE_COLORS, strict=False))
LANE_INCHES, BOX_HEIGHT = 0.42, 0.72


class Box(NamedTuple):
    """What a lane does from `start` to `end`."""

    start: float
    end: float
    text: str
    kind: str


class Schedule(NamedTuple):
    """A picture: its title, what the small print says, and the lanes from the top, each with its boxes."""

    title: str
    details: str
    lanes: tuple[tuple[str, tuple[Box, ...]], ...]


def _latency_group(keys: str, arrives: float, *, hands_over: bool) -> tuple[Box, ...]:
    """A warpgroup of cluster_latency, whose keys arrive at some time."""
    softmax = arrives + 1.0
    boxes = (
        Box(arrives, softmax, "S", PRODUCT),
        Box(softmax, softmax + 2.4, f"P of keys {keys}", SOFTMAX),
        Box(softmax + 2.4, softmax + 3.2, "P V", PRODUCT),
    )
    end = softmax + 3.2
    last = Box(end, end + 0.9, "hand over", MERGE) if hands_over else Box(end, end + 1.0, "merge groups", MERGE)
    return (*boxes, last)


def _latency_block(first: int) -> tuple[tuple[str, tuple[Box, ...]], ...]:
    """The lanes of one block of cluster_latency, which takes 256 keys."""
    rank, half = first // 256, first + 128
    copies = (
        Box(0.2, 1.2, "Q, K", LOAD),
        Box(1.2, 2.2, "K", LOAD),
        Box(2.2, 3.2, "V", LOAD),
        Box(3.2, 4.2, "V", LOAD),
    )
    group = _latency_group(f"{half}-{half + 127}", 2.2, hands_over=False)
    end = group[-1].end
    last = (Box(end, end + 1.8, "exchange rows", MERGE), Box(end + 1.8, end + 2.4, "store", STORE))
    return (
        (f"block {rank}: TMA", copies),
        (f"block {rank}: warpgroup 0", _latency_group(f"{first}-{half - 1}", 1.2, hands_over=True)),
        (f"block {rank}: warpgroup 1", (*group, *last)),
    )


def _turns(name: str, start: float, tiles: int) -> tuple[str, tuple[Box, ...]]:
    """A computing warpgroup of long_turns, which has the exponentials in turns with the other one."""
    boxes: list[Box] = []
    for tile in range(tiles):
        at = start + 2.4 * tile
        boxes += [
            Box(at, at + 0.6, f"S{tile}", PRODUCT),
            Box(at + 0.6, at + 1.8, f"P{tile}", SOFTMAX),
            Box(at + 1.8, at + 2.4, f"PV{tile}", PRODUCT),
        ]
    end = start + 2.4 * tiles
    return name, (*boxes, Box(end, end + 0.9, "O by TMA", STORE))


def _ring() -> tuple[str, tuple[Box, ...]]:
    """The producer of the long rungs, with two key tiles under way."""
    boxes, names, at = [Box(0.0, 0.6, "Q, K0", LOAD)], ["V0", "K1", "V1"], 0.6
    for name in names:
        boxes.append(Box(at, at + 0.6, name, LOAD))
        at += 0.6
    free = 2.4  # a stage is loaded again when both warpgroups have read it
    boxes += [Box(free, free + 0.6, "K2", LOAD), Box(free + 1.8, free + 2.4, "V2", LOAD)]
    return "producer: ring of 2 stages", tuple(sorted(boxes))


def _decode_warp(name: str, start: float) -> tuple[str, tuple[Box, ...]]:
    """A warp of decode_cluster, which copies its own keys and waits for no other one before the merge."""
    boxes = [Box(0.0, start, "copies", LOAD)]
    at = start
    for tile in range(3):
        boxes += [
            Box(at, at + 0.5, f"S{tile}", PRODUCT),
            Box(at + 0.5, at + 1.1, f"P{tile}", SOFTMAX),
            Box(at + 1.1, at + 1.6, f"PV{tile}", PRODUCT),
        ]
        at += 1.6
    boxes += [
        Box(at, at + 0.7, "store part", MERGE),
        Box(7.3, 8.1, "merge warps", MERGE),
        Box(8.1, 9.1, "send parts of O", MERGE),
        Box(9.1, 9.9, "sum, store", STORE),
    ]
    return name, tuple(boxes)


SCHEDULES = {
    "cluster_latency": Schedule(
        "cluster_latency: 512 keys are shared by two blocks of two warpgroups, and each result is sent once",
        "64 queries of one head; a cluster of two blocks; time to the right, widths not measured",
        (*_latency_block(0), *_latency_block(256)),
    ),
    "long_turns": Schedule(
        "long_turns: a producer keeps two key tiles under way, and two warpgroups take turns at the exponentials",
        "a persistent block, 64 queries per warpgroup; each tile has 128 keys; time to the right, widths not measured",
        (_ring(), _turns("warpgroup 1: queries 0-63", 0.6, 3), _turns("warpgroup 2: queries 64-127", 1.8, 3)),
    ),
    "decode_cluster": Schedule(
        "decode_cluster: each warp copies its own keys; warps merge in their block, blocks in their cluster",
        "one tile of queries; 2 of 8 warps in 2 of up to 16 blocks; time to the right, widths not measured",
        (
            _decode_warp("block 0: warp 0", 1.4),
            _decode_warp("block 0: warp 1", 1.6),
            _decode_warp("block 1: warp 0", 1.5),
            _decode_warp("block 1: warp 1", 1.7),
        ),
    ),
}


def picture_of(schedule: Schedule) -> Figure:
    """The lanes, one below the other, with their boxes."""
    figure, axis = new_figure(1.0 + LANE_INCHES * len(schedule.lanes), schedule.title, schedule.details)
    for row, (_, boxes) in enumerate(schedule.lanes):
        axis.axhline(row, color=GUIDE_COLOR, linewidth=1, zorder=0)
        for box in boxes:
            _draw_box(axis, row, box)
    axis.set_yticks(range(len(schedule.lanes)), [name for name, _ in schedule.lanes], color=TEXT_COLOR)
    axis.set_ylim(len(schedule.lanes) - 0.4, -0.6)
    axis.set_xticks([])
    axis.set_xlabel("time", fontsize=8, color=QUIET_COLOR)
    axis.spines[["left"]].set_visible(False)
    return figure


def _draw_box(axis: Axes, row: int, box: Box) -> None:
    width = box.end - box.start
    axis.barh(row, width, BOX_HEIGHT, box.start, color=COLORS[box.kind], edgecolor=PAGE_COLOR, linewidth=1)
    axis.text(box.start + width / 2, row, box.text, ha="center", va="center", fontsize=6, color=PAGE_COLOR)


def draw(folder: Path) -> list[Path]:
    """Draw all schedules into a folder, and return their paths."""
    paths = [folder / f"{name}.svg" for name in SCHEDULES]
    for path, schedule in zip(paths, SCHEDULES.values(), strict=True):
        save_svg(picture_of(schedule), path)
    return paths


def main(arguments: list[str]) -> int:
    """Draw into the folder that is named; return 2 after the usage on stderr if none is."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in draw(Path(arguments[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
