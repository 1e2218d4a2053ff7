"""Measured figures in the prose of a page: which are found, and what each must have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.records.log import save_records
from pytest_fa.records.record import Source
from tests.factories import ENVIRONMENT, SHAPE, record, speed
from tools.docs.measured_figures import main, paragraphs_of, problems_of

COMMIT = "0a1b2c3d" * 5
WHERE = "NVIDIA H200, 2026-11-22, commit 0a1b2c3d"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with the times of two variants on one day, and a limit in its package."""
    times = {"mine": 3.6571, "sdpa_cudnn": 9.149}
    source, day = Source(COMMIT, dirty=False, origin="git"), "2026-11-22T01:02:03+00:00"
    records = [
        record(name, kind="speed", speed=speed(us), environment=ENVIRONMENT, source=source, measured_at=day)
        for name, us in times.items()
    ]
    save_records(records, tmp_path / "profiles")
    (tmp_path / "pytest_fa").mkdir()
    (tmp_path / "pytest_fa" / "limits.py").write_text("CLOCK_US = 0.25\nWAIT_SECONDS = 0.02\nOTHER = 7.5\n")
    return tmp_path


def problems(text: str, folder: Path) -> list[str]:
    """The problems of a page."""
    return [str(each) for each in problems_of(text, folder / "profiles", folder / "pytest_fa")]


@pytest.mark.parametrize(
    "text",
    [
        f"`mine` takes 3.66 us ({WHERE}).",
        f"`mine` takes 3.657us, cuDNN\n9.1 us: a ratio of 0.400, or 0.40x ({WHERE}).",
        f"mine needs 0.40 x the time of cuDNN, from 3.66 to 9.15 us ({WHERE}).",
        f"mine: 0.00366 ms ({WHERE.replace('2026-11-22', '2026-11-20 to 2026-11-23')}).",
        f"| mine | 3.66 us |\n| --- | --- |\n\nMeasured on an {WHERE}.",
        "It takes 3.66 us, no record.",
        "Calls may differ by 0.25 us. Then it waits 20 ms.",
        "Say it takes 3.66 us. <!-- not measured: an example -->",
        "    ```console\n    3.66 us\n    ```",
        "<!-- fa-screen x -->\n\n3.66 us\n\n<!-- /fa-screen -->",
        "Shape 1x8x512x64, tiles of 64 x 128, version 2.11, 8 heads, 30 seconds, b1h8s512d64.",
    ],
)
def test_what_a_page_may_say(folder: Path, text: str) -> None:
    """Figures of records with their card, day and commit; limits of the code; examples; code; generated blocks."""
    assert problems(text, folder) == []


NO_SUCH = "no record of its card, day, commit and variant has it"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n`mine` takes 3.66 us.", "2: 3.66 us: its paragraph has not the card, the day, the commit"),
        ("3.66 us for mine on an H200, commit 0a1b2c3d", "1: 3.66 us: its paragraph has not the day"),
        ("3.66 us for mine on an H200, 2026-11-22", "1: 3.66 us: its paragraph has not the commit"),
        ("3.66 us for mine on 2026-11-22, commit 0a1b2c3d", "1: 3.66 us: its paragraph has not the card"),
        (f"mine takes 3.67 us ({WHERE})", f"1: 3.67 us: {NO_SUCH}"),
        (f"mine takes 3.66 ms ({WHERE})", f"1: 3.66 ms: {NO_SUCH}"),
        (f"mine takes 0.41x of cuDNN ({WHERE})", f"1: 0.41 x: {NO_SUCH}"),
        (f"mine takes 0.40x of another ({WHERE})", f"1: 0.40 x: {NO_SUCH}"),
        (f"mine takes 0.18x of cuDNN's call ({WHERE})", f"1: 0.18 x: {NO_SUCH}"),  # 3.66 by another clock than 20 us
        (f"it takes 3.66 us ({WHERE})", f"1: 3.66 us: {NO_SUCH}"),
        (f"mine takes 3.66 us ({WHERE.replace('0a1b2c3d', '1a1b2c3d')})", f"1: 3.66 us: {NO_SUCH}"),
        (f"mine takes 3.66 us ({WHERE.replace('-22', '-23')})", f"1: 3.66 us: {NO_SUCH}"),
        (f"mine takes 3.66 us ({WHERE}).\n\nOr 9.15 us.", "3: 9.15 us: its paragraph has not the card, the day, the c"),
        ("It takes 7.5 us.", "1: 7.5 us: its paragraph has not the card, the day, the commit"),
    ],
)
def test_what_a_page_may_not_say(folder: Path, text: str, problem: str) -> None:
    """The line has the figure and what is missing; another number, unit, commit, day or variant is not enough."""
    (line,) = problems(text, folder)
    assert line.startswith(problem)


def test_a_figure_is_not_found_in_a_record_without_a_commit(folder: Path) -> None:
    """Of such a record, the paragraph says that it has no commit."""
    other = record("bare", kind="speed", speed=speed(5.0), environment=ENVIRONMENT, measured_at="2026-11-22T00:00:00")
    save_records([msgspec.structs.replace(other, source=Source(None, None, "no git"))], folder / "profiles")
    assert problems(f"bare at {SHAPE}: 5.00 us on an {WHERE}", folder) == [f"1: 5.00 us: {NO_SUCH}"]
    assert problems("bare: 5.00 us on an H200, 2026-11-22, without a commit", folder) == []


def test_lines_are_those_of_the_page() -> None:
    """A generated block, code and a table do not move the lines of what follows."""
    text = "one\n\n```\na\n\nb\n```\n\n| t |\n\n\nbelow\n\nlast\n"
    lines = [(each.line, each.text.split()[-1]) for each in paragraphs_of(text)]
    assert lines == [(1, "one"), (9, "below"), (14, "last")]
    table = paragraphs_of(text)[1].text
    assert table.splitlines().index("below") == 3


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It lists page, line, figure and what is missing, and returns 1; without a page it returns 2."""
    monkeypatch.chdir(folder)
    (folder / "page.md").write_text(f"mine: 3.66 us ({WHERE}).\n", encoding="utf-8")
    assert (main(["page.md"]), capsys.readouterr().out) == (0, "")
    (folder / "page.md").write_text("\nmine: 3.66 us.\n", encoding="utf-8")
    assert main(["page.md"]) == 1
    assert capsys.readouterr().out == "page.md:2: 3.66 us: its paragraph has not the card, the day, the commit\n"
    assert main([]) == 2
