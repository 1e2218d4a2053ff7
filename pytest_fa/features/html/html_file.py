"""`--fa-html`: writes the report of a run."""

from __future__ import annotations

from pathlib import Path

from pytest_fa.features.html.machine import PageFacts
from pytest_fa.features.html.render import write_report
from pytest_fa.options.options import Options
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable
from pytest_fa.table.answer import RunFacts


def write_html(path: Path, records: list[Record], options: Options, run: RunFacts) -> str:
    """Write the report, and return the reason if that fails; empty if it is written."""
    name = f"{options.rootdir.name}, {min(record.measured_at for record in records)}"
    try:
        write_report(path, records, PageFacts(name, options.records_folder, run))
    except OSError as problem:
        return printable(f"{problem.filename or path}: {problem.strerror or problem}")
    return ""
