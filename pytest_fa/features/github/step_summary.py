"""The Markdown of GitHub's step summary: the table of the run, the gates, the failures and the profiles.

Texts of kernels and manifests may be in it, so every text is escaped: as a Markdown cell, or as HTML inside of `<pre>`.
"""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Iterator
from pathlib import Path

from pytest_fa.features.export.exported_table import LEFT_COLUMNS, exported_table
from pytest_fa.features.gate.gate_lines import gate_details, gate_lines
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.ncu.nsight_report import DURATION, NsightReport
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.table.failure import failure_text

LIMIT_BYTES = 2**20  # GitHub drops the whole summary of a step if it is larger
MAX_ROWS = 1000
MAX_CHARACTERS = 16_000  # of one failure
CUT = "\n*The summary ends here, because GitHub allows 1 MiB: the log and the records have the rest.*\n"
_MARKDOWN = re.compile(r"[\\`*_{}\[\]()#|~@:$!]")


def append_summary(records: list[Record], ceilings: Ceilings | None, path: Path) -> None:
    """Append the run to GitHub's step summary, as far as it fits.  An error in writing it is ignored."""
    with contextlib.suppress(OSError):
        used = path.stat().st_size if path.is_file() else 0
        text = summary_markdown(records, ceilings, LIMIT_BYTES - used)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)


def summary_markdown(records: list[Record], ceilings: Ceilings | None = None, limit_bytes: int = LIMIT_BYTES) -> str:
    """The Markdown of these records in at most `limit_bytes` bytes of UTF-8; empty without records."""
    parts: list[str] = []
    left = limit_bytes - len(CUT.encode())
    for part in _parts(records, ceilings) if records else ():
        left -= len(part.encode())
        if left < 0:
            return "".join([*parts, CUT]) if limit_bytes >= len(CUT.encode()) else ""
        parts.append(part)
    return "".join(parts)


def markdown_text(text: str) -> str:
    """The text on one line, with an entity for each character that has a meaning in Markdown or HTML."""
    return _MARKDOWN.sub(lambda match: f"&#{ord(match[0])};", html.escape(" ".join(text.split())))


def _parts(records: list[Record], ceilings: Ceilings | None) -> Iterator[str]:
    """The pieces of the summary, none of which may be cut."""
    failed = [record for record in records if record.outcome.exit_status != 0]
    environment = records[0].environment
    machine = markdown_text(environment.gpu or f"{environment.cpu}, no GPU")
    yield f"### Attention kernels on {machine}\n\n"
    count = f"{len(failed)} of {len(records)} tests failed" if failed else f"all {len(records)} tests passed"
    yield f"{count}; pytest-fa {environment.pytest_fa}, torch {environment.torch}\n\n"
    yield from _table([record for record in records if record.kind != "selftest"], ceilings)
    yield from _selftest([record for record in records if record.kind == "selftest"])
    for record in records:
        if gate := Gate.of(record):
            yield f"<pre>{html.escape(chr(10).join(gate_lines(record.variant, gate)))}</pre>\n\n"
    yield from _failures(failed)
    yield from _profiles(records)


def _table(records: list[Record], ceilings: Ceilings | None) -> Iterator[str]:
    """The terminal's table, without the columns that are empty in every row."""
    table = exported_table(records, ceilings)
    if not table:
        return
    titles, *rows = table
    yield _row(titles)
    yield "".join("| --- " if title in LEFT_COLUMNS else "| ---: " for title in titles) + "|\n"
    for row in rows[:MAX_ROWS]:
        yield _row(row)
    yield f"\nand {len(rows) - MAX_ROWS} more rows\n\n" if len(rows) > MAX_ROWS else "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(markdown_text, cells))} |\n"


def _selftest(records: list[Record]) -> Iterator[str]:
    """The kernels of the self-test with an unexpected result; a number if there are none."""
    if records:
        wrong = [record.variant for record in records if record.outcome != Outcome.OK]
        listed = f": {markdown_text(', '.join(wrong))}" if wrong else ""
        yield f"self-test: {len(wrong)} of {len(records)} kernels with an unexpected result{listed}\n\n"


def _failures(failed: list[Record]) -> Iterator[str]:
    """For each variant and fault, the text of its first failure, folded."""
    faults: dict[tuple[str, str], list[Record]] = {}
    for record in failed:
        faults.setdefault((record.variant, record.outcome), []).append(record)
    for (variant, _), group in faults.items():
        count = f" ({len(group)} tests)" if len(group) > 1 else ""
        text = failure_text(group[0], gate_details(group[0]))
        shown = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
        title = html.escape(f"{variant}: {group[0].outcome.heading}{count}")
        yield f"<details><summary>{title}</summary>\n\n<pre>\n{html.escape(shown)}\n</pre>\n\n</details>\n\n"


def _profiles(records: list[Record]) -> Iterator[str]:
    """The table of the profiles."""
    profiled = [(each, report) for each in records if (report := NsightReport.of(each))]
    if not profiled:
        return
    yield "### Profiles (Nsight Compute)\n\n"
    yield "| case | us, profiled | bottleneck | report |\n| --- | ---: | --- | --- |\n"
    for record, profile in profiled:
        longest = profile.longest
        us = f"{sum(each.counters.get(DURATION, 0.0) for each in profile.kernels) / 1000:.2f}" if longest else "-"
        bottleneck = (
            longest.bottleneck.sentence if longest and longest.bottleneck else f"not measured: {profile.message}"
        )
        yield _row([record.id, us, bottleneck, profile.report or "-"])
    yield "\n"
