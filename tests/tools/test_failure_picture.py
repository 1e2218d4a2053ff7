"""The picture of a failure in a terminal: its words are those that a run prints today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.docs.failure_picture import CAUSE, SESSION, UnexpectedOutput, draw_session, main, run_session, words_in

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "failure.svg"
OUTPUTS = [
    "kernels/mine: entry.py, variant.yaml\nnext: nothing of this\n",
    "\x1b[32mmine: 2/2 checks passed\x1b[0m\n",
    "",
    (
        "a heading\n"
        f"wrong: max error 1.0e-02, allowed 1.0e-03: {CAUSE}\n"
        "  stages: not shown\n"
        "  elements: 5 of 8 bad\n"
        "  first bad: dim 1\n"
        "  worst: got 1.5, want 2\n"
        f"  likely cause: {CAUSE}\n"
        "  cross-check: sdpa_math right\n"
        "  only the candidate is wrong; right: sdpa_math\n"
        "  rerun: pytest & more\n"
    ),
]


@pytest.mark.nightly
def test_the_picture_shows_what_a_run_prints(tmp_path: Path) -> None:
    """The commands of the picture print its words today, in an empty folder; only other figures may differ."""
    pytest.importorskip("torch")
    assert words_in(draw_session(run_session(tmp_path))) == words_in(PICTURE.read_text(encoding="utf-8"))


def test_the_picture_has_every_command_and_the_cause() -> None:
    """The picture in the README has the commands of the session, in their order, and the cause, and loads nothing."""
    picture = PICTURE.read_text(encoding="utf-8")
    rows = re.findall(r">([^<]*)</text>", picture.replace("&#160;", " ").replace("&#x27;", "'"))
    assert [row for row in rows if row in {command.line for command in SESSION}] == [each.line for each in SESSION]
    assert f"likely cause: {CAUSE} cross-check" in words_in(picture)
    assert re.findall(r"https?://[^\"]*|@import|url\((?!#)", picture) == ["http://www.w3.org/2000/svg"]


def test_lines_are_left_out_with_dots() -> None:
    """Lines of a failure that are not shown are dots; a number but that of the cause is masked for the comparison."""
    words = words_in(draw_session(OUTPUTS))
    assert "nothing of this" not in words
    assert f"wrong: max error #, allowed #: {CAUSE} ... elements: # of # bad" in words
    assert words.endswith(
        "cross-check: sdpa_math right only the candidate is wrong; right: sdpa_math rerun: pytest &amp; more"
    )


def test_a_line_that_is_missing_is_reported() -> None:
    """If a run no longer prints a line of the picture, nothing is drawn."""
    with pytest.raises(UnexpectedOutput, match="no line begins with '  likely cause: '"):
        draw_session([*OUTPUTS[:3], OUTPUTS[3].replace("likely cause", "the cause")])


def test_without_a_file_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a path, the command prints its usage and exits with status 2."""
    assert main([]) == 2
    assert "python -m tools.docs.failure_picture" in capsys.readouterr().err
