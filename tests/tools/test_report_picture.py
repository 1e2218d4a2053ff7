"""The screenshot of the HTML report: a command takes it with Chromium, and it is small enough for a page."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tools.docs.report_picture import MAX_KB, WIDTH, NoPicture, find_browser, main, take_screenshot

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "report.png"


def png_width(path: Path) -> int:
    """The width of a PNG in pixels."""
    width: int = struct.unpack(">I", path.read_bytes()[16:20])[0]
    return width


def test_the_committed_screenshot_is_small() -> None:
    """The screenshot in the pages has the width of a desktop window, and at most `MAX_KB`."""
    assert png_width(PICTURE) == WIDTH
    assert PICTURE.stat().st_size <= MAX_KB * 1024


@pytest.mark.nightly
@pytest.mark.alone
def test_the_command_takes_a_screenshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes a PNG of the report, as wide as a desktop window."""
    pytest.importorskip("PIL")
    try:
        find_browser()
    except NoPicture as problem:
        pytest.skip(str(problem))
    picture = tmp_path / "report.png"
    assert main([str(ROOT / "profiles" / "nvidia-h200"), str(picture)]) == 0, capsys.readouterr().err
    assert png_width(picture) == WIDTH
    assert capsys.readouterr().out == f"{picture}: {picture.stat().st_size // 1024} KB\n"


def test_a_missing_browser_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a browser, the command says which names it looked for, and writes nothing."""
    monkeypatch.setenv("FA_BROWSER", "no-such-browser")
    picture = Path(os.devnull)
    assert main([str(ROOT / "profiles" / "none"), str(picture)]) == 2
    message = "no browser: none of no-such-browser is on PATH; set FA_BROWSER to the path of a Chromium\n"
    assert capsys.readouterr().err == message


def test_a_browser_that_fails_is_reported(tmp_path: Path) -> None:
    """If the browser takes no screenshot, its exit status is reported and nothing is written."""
    pytest.importorskip("PIL")
    with pytest.raises(NoPicture, match="took no screenshot, exit status 1"):
        take_screenshot("/bin/false", tmp_path / "report.html", tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()
