"""The hooks of the HTML report: its file, and what pytest-html shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.features.html.html_file import write_html
from pytest_fa.features.html.html_page import record_html, table_html
from pytest_fa.features.html.plugin import HtmlOptions
from pytest_fa.features.ncu.ncu_lines import profile_lines
from pytest_fa.features.ncu.nsight_report import NsightReport
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import RESULTS_KEY
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.record import Record
from pytest_fa.table.layout import TextLine


class Hooks:
    """The report in one run."""

    def __init__(self, config: pytest.Config) -> None:
        asked = config.stash[OPTIONS_KEY].part(HtmlOptions)
        self._path = asked.path if asked else None
        self._results = config.stash.get(RESULTS_KEY, None)  # not in a worker of pytest-xdist
        self._problem = ""

    def pytest_fa_finish(self, results: Results, config: pytest.Config) -> str:
        """Write the report; return why it could not be written."""
        if self._path and results.records:
            self._problem = write_html(self._path, results.records, results.options, results.facts(config))
        return f"--fa-html was not written: {self._problem}" if self._problem else ""

    def pytest_fa_file_lines(self, results: Results) -> list[TextLine]:
        """Where the report is."""
        if self._problem:
            return []
        return [TextLine(f"report: {results.relative(self._path)}")] if self._path else []

    def pytest_fa_extras(self, record: Record, config: pytest.Config) -> list[Any]:
        """Figures and error map for the page of pytest-html; links to the Nsight report and its CSV."""
        page = config.getoption("htmlpath", default=None)
        if not page:
            return []
        from pytest_html import extras  # noqa: PLC0415  # an optional plugin, which is in use here

        parts = [extras.html(record_html(record))]
        report = NsightReport.of(record)
        if report is None:
            return parts
        folder = config.invocation_params.dir / Path(page).parent
        files = {"Nsight Compute report": report.report, "counters (CSV)": report.table}
        parts += [
            extras.url(os.path.relpath(config.rootpath / path, folder), name=name)
            for name, path in files.items()
            if path
        ]
        return [*parts, extras.text("\n".join(profile_lines([record])), name="profile")]

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_summary(self, summary: list[str]) -> None:
        """Add the table of the run to the page of pytest-html."""
        if self._results and self._results.records:
            summary += filter(None, [table_html(self._results.records, self._results.ceilings[0])])
