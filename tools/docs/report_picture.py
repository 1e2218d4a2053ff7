"""Takes a screenshot of the top of the HTML report of a records folder, with Chromium.

python -m tools.docs.report_picture profiles/nvidia-h200 docs/pictures/report.png

FA_BROWSER names a Chromium that is not on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pytest_fa.errors import FaError
from pytest_fa.features.html.machine import PageFacts
from pytest_fa.features.html.render import html_report
from pytest_fa.records.log import read_records

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1200, 880  # pixels
COLORS = 256  # of the file, which is smaller with few
MAX_KB = 150
SECONDS = 120  # for the browser


class NoPicture(FaError):
    """There is no browser, or it took no screenshot, or the file is too large for a page."""


def main(arguments: list[str]) -> int:
    """Take the screenshot; return 2 after one line on stderr if that fails."""
    if len(arguments) != 2 or arguments[0].startswith("-"):  # noqa: PLR2004  # the folder and the picture
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    folder, picture = map(Path, arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="fa-report-") as place:
            page = Path(place) / "report.html"
            records = [record for path in sorted(folder.glob("*.jsonl")) for record in read_records(path)]
            page.write_bytes(html_report(records, PageFacts(str(folder), folder.parent)))
            take_screenshot(find_browser(), page, picture)
    except (FaError, OSError, ImportError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    sys.stdout.write(f"{picture}: {picture.stat().st_size // 1024} KB\n")
    return 0


def find_browser() -> str:
    """The path of Chromium.  Raises `NoPicture` without one."""
    names = [os.environ["FA_BROWSER"]] if "FA_BROWSER" in os.environ else BROWSERS
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        raise NoPicture(f"no browser: none of {', '.join(names)} is on PATH; set FA_BROWSER to the path of a Chromium")
    return path


def take_screenshot(browser: str, page: Path, picture: Path) -> None:
    """Write what a light desktop window shows of a page.  Raises `NoPicture` if the browser fails."""
    from PIL import Image  # noqa: PLC0415  # comes with matplotlib, from the extra `report`

    raw = page.with_suffix(".png")
    window = (f"--window-size={WIDTH},{HEIGHT}", "--hide-scrollbars", "--blink-settings=preferredColorScheme=1")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *window, f"--screenshot={raw}", page.as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)  # noqa: S603
    if not raw.is_file():
        raise NoPicture(f"{browser} took no screenshot, exit status {process.returncode}: {process.stderr[-500:]}")
    with Image.open(raw) as image:
        image.convert("RGB").quantize(COLORS).save(raw, optimize=True)
    size = raw.stat().st_size
    if size > MAX_KB * 1024:
        raise NoPicture(f"the screenshot has {size // 1024} KB, allowed are {MAX_KB}: lower HEIGHT or COLORS")
    picture.write_bytes(raw.read_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
