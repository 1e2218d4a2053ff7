r"""Write the page: one HTML file without scripts, whose style is permitted by its hash.

Jinja2 escapes every text, and control characters are shown as escapes, such as `\x1b`.  The page loads nothing, and its
Content-Security-Policy forbids to load anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup

import pytest_fa
from pytest_fa.features.html.hierarchy import BAR_WIDTH
from pytest_fa.features.html.machine import PageFacts, machine_of
from pytest_fa.features.html.strips import CLOCK_HEIGHT, CLOCK_WIDTH, STRIP_HEIGHT, STRIP_WIDTH
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable

FOLDER = Path(__file__).parent
LONGEST_TEXT = 300  # characters of a name or a cell


def html_report(records: Sequence[Record], facts: PageFacts) -> bytes:
    """The page of these records, one section for each GPU, as UTF-8.  Unreadable ceilings are a note on the page."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.environment.gpu or record.environment.cpu, []).append(record)
    machines = [machine_of(name, group, facts) for name, group in groups.items()]
    css = (FOLDER / "page.css").read_text(encoding="utf-8")
    page = _templates().get_template("page.html.j2")
    text = page.render(
        name=facts.name,
        complaints=facts.complaints,
        count=len(records),
        version=pytest_fa.__version__,
        machines=machines,
        css=Markup(css),  # noqa: S704  # our own file
        policy=content_policy(css),
    )
    return text.encode()


def write_report(path: Path, records: Sequence[Record], facts: PageFacts) -> None:
    """Write the page to `path`, whose folder is created.  Raises `OSError` if that fails."""
    content = html_report(records, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def content_policy(css: str) -> str:
    """The Content-Security-Policy of the page: nothing is loaded, no script runs, and only this style applies."""
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _templates() -> Templates:
    templates = Templates(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["cut"] = _cut
    templates.globals.update(
        bar_width=BAR_WIDTH,
        strip_width=STRIP_WIDTH,
        strip_height=STRIP_HEIGHT,
        clock_width=CLOCK_WIDTH,
        clock_height=CLOCK_HEIGHT,
    )
    return templates


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
