"""GitHub's step summary: what it has, how its text is escaped, and how large it can be."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.github.step_summary import LIMIT_BYTES, append_summary, markdown_text, summary_markdown
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from tests.factories import RECORD

EVIL = "a|b </pre></details><script>x</script>\n::set-output name=a::b [c](javascript:d) `e` @f"


def wrong(number: int, message: str = "m") -> Record:
    """A failed record of variant number `number`."""
    return msgspec.structs.replace(RECORD, id=f"v{number}-x", variant=f"v{number}", message=message)


def test_an_ordinary_run_has_its_table(snapshot: SnapshotAssertion) -> None:
    """A run without profiles has a title, the counts, the rows of the terminal's table, and each failure once."""
    right = msgspec.structs.replace(RECORD, outcome=Outcome.OK, variant="right", check=None)
    lines = summary_markdown([right, RECORD, RECORD]).splitlines()
    assert lines[0] == "### Attention kernels on NVIDIA H200"
    assert lines[2].startswith("2 of 3 tests failed; pytest-fa ")
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [header[0], header[2], *header[-1:]] == ["variant", "checks", "TFLOP/s"]
    assert [row[0] for row in rows] == ["right", "ws&#95;p2&#64;BLOCK&#95;M=64"]
    assert snapshot == [line for line in lines if line.startswith("<details>")]


def test_a_run_without_records_has_none(tmp_path: Path) -> None:
    """Without records the summary is empty."""
    append_summary([], None, tmp_path / "summary.md")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == ""


def test_untrusted_text_is_escaped() -> None:
    """The words of a kernel cannot end the folded part, begin a tag, a link or a cell, or be a Markdown mark."""
    text = summary_markdown([wrong(0, EVIL)])
    assert re.findall(r"</?(?:script|details|pre|summary)>", text) == [
        "<details>",
        "<summary>",
        "</summary>",
        "<pre>",
        "</pre>",
        "</details>",
    ]
    assert re.findall(r"[|<>`@\[\]()]|::|\n", markdown_text(EVIL)) == []


@pytest.mark.parametrize("limit", [100, 1000, 20_000, LIMIT_BYTES])
def test_it_is_never_larger_than_allowed(limit: int) -> None:
    """However many failures with however long messages there are, the summary fits, and says that it was cut."""
    text = summary_markdown([wrong(number, "\N{GREEK SMALL LETTER MU}<" * 50_000) for number in range(60)], None, limit)
    assert len(text.encode()) <= limit
    assert text.endswith("have the rest.*\n") or limit == 100
    assert text.count("<details>") == text.count("</details>")


def test_earlier_parts_of_the_step_count(tmp_path: Path) -> None:
    """The summary fits beside what the step has already written; a folder in its place is ignored."""
    path = tmp_path / "summary.md"
    path.write_bytes(b"x" * (LIMIT_BYTES - 500))
    append_summary([wrong(number) for number in range(9)], None, path)
    assert LIMIT_BYTES - 500 < path.stat().st_size <= LIMIT_BYTES
    append_summary([RECORD], None, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["summary.md"]


def test_a_table_of_thousands_of_rows_is_cut() -> None:
    """The table has at most 1,000 rows and counts the others, so that the failures still fit."""
    text = summary_markdown([msgspec.structs.replace(wrong(number), outcome=Outcome.OK) for number in range(1200)])
    assert len(re.findall(r"^\| v\d", text, re.MULTILINE)) == 1000
    assert "and 200 more rows" in text
