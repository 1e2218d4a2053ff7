"""The HTML report in a real browser, on a phone and on a desktop, light and dark, with 10,000 records."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.features.html.machine import PageFacts
from pytest_fa.features.html.render import html_report
from tests.features.html.test_page import H200, many, small_run

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PHONE, DESKTOP = 390, 1280
WIDEST_BARS = 768
ATTEMPTS = 5  # until the browser reports a paint
# A page that shows the report in a frame and writes down what the browser made of it.
HARNESS = """\
<body style="margin:0">
<iframe id=frame width={width} height=800 style="border:0" src="{page}"></iframe><pre id=out></pre>
<script>
frame.onload = () => setTimeout(() => {{
  const page = frame.contentDocument, root = page.documentElement;
  out.textContent = JSON.stringify({{
    scroll: root.scrollWidth, client: root.clientWidth, sections: page.querySelectorAll("h2").length,
    bars: [...page.querySelectorAll(".bars")].map(bars => [bars.offsetWidth, bars.parentElement.clientWidth]),
    maxWidth: frame.contentWindow.getComputedStyle(page.body).maxWidth,
    paints: frame.contentWindow.performance.getEntriesByType("paint").map(paint => paint.startTime),
  }});
}}, 300);
</script>
"""

pytestmark = [pytest.mark.alone, pytest.mark.nightly]


@pytest.fixture(scope="module")
def browser() -> str:
    """A Chromium: that of FA_BROWSER, or one on PATH."""
    names = [os.environ["FA_BROWSER"]] if "FA_BROWSER" in os.environ else BROWSERS
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on PATH (FA_BROWSER names another)")
    return path


def run(browser: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One run of the browser; every second of the page's own clock passes at once."""
    common = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    command = [browser, *common, "--virtual-time-budget=10000", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def look(browser: str, page: Path, width: int) -> dict[str, Any]:
    """What the browser made of a page in a window of this width."""
    harness = page.with_name(f"harness-{width}.html")
    harness.write_text(HARNESS.format(width=width, page=page.name), encoding="utf-8")
    seen: dict[str, Any] = {}
    for _ in range(ATTEMPTS):
        process = run(browser, "--allow-file-access-from-files", "--dump-dom", harness.as_uri())
        match = re.search(r'<pre id="out">(.+?)</pre>', process.stdout)
        assert match is not None, process.stderr
        seen = json.loads(html.unescape(match[1]))
        assert re.findall(r".*(?:Content Security Policy|Refused to).*", process.stderr) == []
        if seen["paints"]:
            break
    return seen


def colors(browser: str, page: Path, width: int, scheme: str) -> list[tuple[int, int, int]]:
    """The colours of a screenshot, the most frequent first."""
    image = pytest.importorskip("PIL.Image")
    picture = page.with_suffix(f".{width}.{scheme}.png")
    number = {"dark": 0, "light": 1}[scheme]
    run(
        browser,
        f"--screenshot={picture}",
        f"--window-size={width},1000",
        f"--blink-settings=preferredColorScheme={number}",
        page.as_uri(),
    )
    counts = image.open(picture).convert("RGB").getcolors(maxcolors=2**20)
    return [color for _, color in sorted(counts, reverse=True)]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The report of a small run with everything in it."""
    path = tmp_path / "report.html"
    path.write_bytes(
        html_report(small_run(), PageFacts("repro_bundle_0123456789ab_20260101T000000Z.tar.gz", H200.parent))
    )
    return path


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_fits_its_window(browser: str, page: Path, width: int) -> None:
    """The page and its bars are not wider than its window, and its style applies under its Content-Security-Policy."""
    seen = look(browser, page, width)
    assert seen["scroll"] <= seen["client"]
    assert seen["maxWidth"] == "1248px"
    assert seen["sections"] >= 7
    assert seen["bars"]
    assert [own for own, _ in seen["bars"]] == [min(room, WIDEST_BARS) for _, room in seen["bars"]]


@pytest.mark.parametrize("width", [PHONE + 110, DESKTOP])  # a window of Chromium has at least 500 pixels
def test_the_page_is_light_or_dark(browser: str, page: Path, width: int) -> None:
    """The background follows the colour scheme of the reader; red marks a failure in both."""
    light, dark = (colors(browser, page, width, scheme) for scheme in ("light", "dark"))
    assert (light[0], dark[0]) == ((255, 255, 255), (13, 17, 23))
    assert (207, 34, 46) in light
    assert (248, 81, 73) in dark


def test_ten_thousand_records_are_painted_within_a_second(browser: str, tmp_path: Path) -> None:
    """The first paint of a page of 10,000 records is within 1 s after its navigation started."""
    path = tmp_path / "many.html"
    path.write_bytes(html_report(many(10_000), PageFacts("many", H200.parent)))
    paints = look(browser, path, DESKTOP)["paints"]
    assert paints
    assert min(paints) < 1000


def test_the_page_can_be_printed(browser: str, page: Path) -> None:
    """The browser prints the page to a PDF."""
    out = page.with_suffix(".pdf")
    run(browser, f"--print-to-pdf={out}", page.as_uri())
    assert out.read_bytes().startswith(b"%PDF")
