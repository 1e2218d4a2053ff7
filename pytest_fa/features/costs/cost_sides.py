"""Read the records of one run and the file with its seconds."""

from __future__ import annotations

from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.features.compare.sides import read_side
from pytest_fa.features.costs.cost_table import CostSide
from pytest_fa.records.costs import read_run_seconds


def newest_run(artifacts: Path) -> str:
    """The record file of the newest run.  Raises `UsageProblem` if there is none."""
    runs = sorted(path for path in (artifacts / "records").glob("*.jsonl") if not path.stem.endswith("-watch"))
    if not runs:
        raise UsageProblem(f"costs: no run in {artifacts / 'records'}; run pytest --fa-variant=NAME, or name records")
    return str(runs[-1])


def read_cost_side(word: str, folder: Path) -> CostSide:
    """The records that `word` names, and the seconds of their run.  Raises `UsageProblem` if it has no records."""
    side, path = read_side(word, folder), folder / word
    if not path.is_file() or path.suffix != ".jsonl":
        return CostSide(side.name, side.records, "the records may be those of several runs")
    return CostSide(path.name, side.records, read_run_seconds(path))
