"""What pytest-fa adds to the page of pytest-html."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import msgspec
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.html.html_page import record_html, table_html
from pytest_fa.records.checks import Diagnosis
from tests.factories import RECORD

TITLE = "error by head and tile of 16 queries ('.': within the bound)"
DIAGNOSIS = Diagnosis(
    (TITLE, "batch 0 head  0  .19N", "batch 0 head  1  ....", "and 3 more heads"), "a <b> tail", (), ""
)


def test_the_error_map_is_a_table_of_tiles() -> None:
    """Each line of the map is a row, each mark a cell; a tile within the bound and a wrong one differ in colour."""
    text = record_html(msgspec.structs.replace(RECORD, diagnosis=DIAGNOSIS))
    page = ET.fromstring(f"<body>{text}</body>")  # noqa: S314  # our own text
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows == [
        ["batch 0 head  0", ".", "1", "9", "N"],
        ["batch 0 head  1", ".", ".", ".", "."],
        ["and 3 more heads"],
    ]
    colors = re.findall(r"background: (#\w+)", text)
    assert [colors[0] == color for color in colors] == [True, False, False, False, True, True, True, True]
    assert "likely cause: a &lt;b&gt; tail" in text


def test_a_right_output_has_only_its_figures(snapshot: SnapshotAssertion) -> None:
    """A record without a diagnosis has one paragraph with outcome, error and times."""
    text = record_html(msgspec.structs.replace(RECORD, diagnosis=None))
    assert snapshot == text


def test_the_table_of_the_run() -> None:
    """The page has the terminal's table with its times; every text is escaped, and nothing is loaded."""
    text = table_html([msgspec.structs.replace(RECORD, variant="<script>")], None)
    assert ("<script>" in text, "&lt;script&gt;" in text, "10.25" in text) == (False, True, True)
    assert re.findall(r"src=|href=|url\(", text) == []
    assert table_html([], None) == ""
