"""Figures of generated tables: each must be in a record with the card, day and commit that the table states."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kernels.auto.rung_times import UNSEEN, RungTimes, write_rung_times
from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record, Source
from pytest_fa.records.timing import Clocks
from tests.factories import ENVIRONMENT, OK, SHAPE, SMALL_SHAPE, record, speed
from tools.docs.markdown import rewrite
from tools.docs.pipes import Loop, Pipes, write_pipes
from tools.docs.table_figures import problems_of

FOLDER = "profiles=profiles/nvidia-h200"
BY_VARIANT = f"fa-variants {FOLDER} cases={SHAPE},{SMALL_SHAPE} variants=mine,other against=other"
BLOCKS = {
    "variants": (
        f"<!-- {BY_VARIANT} columns=variant,checks,device_us,call_us,tflops,ratios -->\n<!-- /fa-variants -->\n"
    ),
    "shapes": (
        f"<!-- fa-shapes {FOLDER} cases={SHAPE},{SMALL_SHAPE} variants=mine,other against=mine "
        "columns=rates,ratios,to_fastest -->\n<!-- /fa-shapes -->\n"
    ),
    "screen": f"<!-- fa-screen {FOLDER} cases={SHAPE} variants=mine,other width=120 -->\n<!-- /fa-screen -->\n",
    "clocks": (f"<!-- fa-findings of=clocks {FOLDER} cases={SHAPE} variants=mine,other -->\n<!-- /fa-findings -->\n"),
}


def timed(variant: str, us: float, shape: str = SHAPE) -> Record:
    """A time of an H200."""
    return record(
        variant,
        f"{shape}-seed0",
        "speed",
        check=OK,
        speed=speed(us),
        environment=ENVIRONMENT,
        source=Source("0a1b2c3d" * 5, dirty=False, origin="git"),
        measured_at="2026-11-27T01:02:03+00:00",
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the times of two variants at two shapes."""
    times = [
        timed("mine", 10.25),
        timed("other", 20.5),
        timed("mine", 1.25, SMALL_SHAPE),
        timed("other", 1.5, SMALL_SHAPE),
    ]
    save_records(times, tmp_path / "profiles")
    return tmp_path


@pytest.mark.parametrize("kind", BLOCKS)
def test_generated_tables_have_their_records(root: Path, kind: str) -> None:
    """Nothing is missing in a table that was just made."""
    page = rewrite(BLOCKS[kind], root)
    assert "10.25" in page
    assert problems_of(page, root) == []


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_changed_figure_is_found(root: Path, kind: str) -> None:
    """Each figure of a row, with another last digit, is the only problem."""
    page = rewrite(BLOCKS[kind], root)
    rows = re.finditer(r"^(\| `|  (mine|other) ).*", page, re.MULTILINE)
    figures = [
        match.start() + figure.end() - 1
        for match in rows
        for figure in re.finditer(r"(?<![\w/.])\d+\.\d+(?![\w/])", match[0])
    ]
    assert len(figures) >= 2
    for place in figures:
        other = str((int(page[place]) + 3) % 10)
        problems = problems_of(page[:place] + other + page[place + 1 :], root)
        assert len(problems) == 1, (place, problems)


@pytest.mark.parametrize(
    ("old", "new"),
    [("H200, 2", "H100, 2"), ("2026-11-27", "2026-11-26"), ("0a1b2c3d", "1a1b2c3d"), ("Measured on", "Made on")],
)
def test_the_origin_must_be_that_of_the_records(root: Path, old: str, new: str) -> None:
    """With another card, day or commit below the table, or without that line, no figure has a record."""
    page = rewrite(BLOCKS["variants"], root)
    body, line = page.split("\n\nMeasured", 1)
    problems = problems_of(f"{body}\n\n{('Measured' + line).replace(old, new)}", root)
    assert problems[0] == f"1: mine at {SHAPE}, device_us {SHAPE}: 10.25"
    assert len(problems) == 10


def test_a_failure_must_be_of_its_day(root: Path) -> None:
    """What stands in place of a time is compared with the newest result, too."""
    failed = msgspec.structs.replace(
        timed("mine", 9.0), outcome=Outcome.WRONG, measured_at="2026-11-28T01:02:03+00:00", speed=None
    )
    save_records([failed], root / "profiles")
    page = rewrite(BLOCKS["variants"], root)
    assert "wrong (2026-11-28)" in page
    assert problems_of(page.replace("2026-11-27, commit", "2026-11-27 to 2026-11-28, commit"), root) == []
    assert problems_of(page.replace("wrong", "hung"), root) == [
        f"1: mine at {SHAPE}, device_us {SHAPE}: hung (2026-11-28)"
    ]


def test_a_table_that_cannot_be_read_is_a_problem(root: Path) -> None:
    """A table without cells, and a column that is not known, are not passed over."""
    assert problems_of(BLOCKS["screen"], root) == ["1: no cell of the table can be read"]
    page = rewrite(BLOCKS["variants"], root).replace("call_us", "furlongs")
    assert problems_of(page, root)[0] == f"1: mine at {SHAPE}, furlongs: 20.00"


def test_a_file_must_have_the_stated_origin_and_the_figures(tmp_path: Path) -> None:
    """Of `pipes.json`, each figure is compared; of `unseen.json`, card, day and commit."""
    source, day = Source("0a1b2c3d" * 5, dirty=False, origin="git"), "2026-11-27"
    loops = {"products": Loop((2.0, 3.0), 2.5, Clocks(1700, 3201, 650.4, 60, 0)), "maxima": Loop((9.0,), 9.0, None)}
    write_pipes(Pipes(loops, {"products": 819.4}, {"maxima": 55.6}, ENVIRONMENT, source, day), tmp_path / "profiles")
    us = {SHAPE: dict.fromkeys(("cluster_latency", "long_shapes", "long_from_end", "decode_cluster"), 10.0)}
    write_rung_times(RungTimes(us, ENVIRONMENT, source, day), tmp_path / "profiles", UNSEEN)
    pipes = rewrite("<!-- fa-file profiles/nvidia-h200/pipes.json -->\n<!-- /fa-file -->\n", tmp_path)
    unseen = rewrite("<!-- fa-regret profiles/nvidia-h200 -->\n<!-- /fa-regret -->\n", tmp_path)
    assert problems_of(pipes, tmp_path) == problems_of(unseen, tmp_path) == []
    assert problems_of(pipes.replace("819", "820"), tmp_path) == ["1: products, TFLOP/s: 820"]
    for page, name in ((pipes, "pipes.json"), (unseen, "unseen.json")):
        assert problems_of(page.replace(day, "2026-11-28"), tmp_path) == [f"1: {name} has another card, day or commit"]
