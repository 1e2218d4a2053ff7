"""The map in `CONTRIBUTING.md` matches the tree."""

from __future__ import annotations

import re
from pathlib import Path

from tests.repo.test_layers import LAYERS

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page, without its own heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names_in(cell: str) -> list[str]:
    """The texts of a cell that stand in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_map_has_every_layer() -> None:
    """The map of the page has every layer of `test_layers.py`, in the same order."""
    named = [name for layer, _ in rows_below("Layers") for name in names_in(layer)]
    assert list(LAYERS) == [name for name in named if name in LAYERS]


def test_every_place_exists() -> None:
    """Each file or folder of the table of places is in the package or in the repository."""
    rows = rows_below("Where does a line belong")
    assert len(rows) >= 20
    places = [name for _, place in rows for name in names_in(place) if "/" in name and "<" not in name]
    roots = (REPOSITORY / "pytest_fa", REPOSITORY)
    assert [place for place in places if not any((root / place).exists() for root in roots)] == []
