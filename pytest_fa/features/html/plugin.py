"""What the HTML report adds: `--fa-html`, `python -m pytest_fa report`, and lines on the page of pytest-html."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import Feature, FeatureOptions, OptionRow, Reader, Subcommand
from pytest_fa.options.values import folder

OPTIONS = (
    OptionRow(
        "--fa-html",
        "write the report of this run, one HTML file that opens offline",
        "FILE",
        why_once="a report is written from a run that ends",
        writes_records=True,
        everyday=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class HtmlOptions(FeatureOptions):
    """The file of the report; None if only pytest-html writes a page."""

    path: Path | None

    needs_new_times = True


def read(reader: Reader) -> HtmlOptions | None:
    """The file of --fa-html; None without a page.  Raises `UsageProblem`."""
    text = reader.text("fa_html")
    path = folder(reader.base_of("fa_html"), text)
    if path is not None and path.is_dir():
        raise UsageProblem(f"--fa-html: {text!r} is a folder; give a file, such as {text.rstrip('/')}/report.html")
    return HtmlOptions(path) if path or reader.is_used("htmlpath") else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m pytest_fa report`."""
    forms = "record files, folders of them, bundles, or git revisions"
    parser.add_argument("records", metavar="RECORDS", nargs="+", help=forms)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument(
        "--profiles", type=Path, default=Path("profiles"), help="where a GPU's peak rates and noise are"
    )


FEATURE = Feature(
    "html",
    title="one page",
    options=OPTIONS,
    read=read,
    requires=("gate", "ncu", "compare", "export"),
    commands=(
        Subcommand("report", "write one HTML file about records, which opens offline", "report_command", add_arguments),
    ),
)
