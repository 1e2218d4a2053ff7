"""What the user sees at the end, and what is kept: records as they come, the table, the list of variants."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from pytest_fa.catalog.discover import Catalog
    from pytest_fa.options import Options
    from pytest_fa.records.log import RecordLog
    from pytest_fa.records.record import Record


MATRIX_WIDTH = 200
LIST_WIDTH = 160


class Results:
    """The records of one run and the reasons why some cases gave none."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._records: list[Record] = []
        self._not_run: dict[str, Counter[str]] = {"build": Counter(), "case": Counter()}
        self._did_case = False
        self._failed_otherwise = False
        self._problem: OSError | None = None
        self._saved: list[Path] = []

    @property
    def nothing_ran(self) -> bool:
        """Whether something was selected and nothing done: no case got past its build, or no build took place."""
        no_case = bool(self._not_run["case"]) and not self._did_case
        return no_case or (bool(self._not_run["build"]) and not self._records)

    @property
    def is_lost(self) -> bool:
        """Whether a record could not be written."""
        return self._problem is not None

    @property
    def is_inconclusive(self) -> bool:
        """Whether all that stands between this run and success are gates without a verdict."""
        return not self._failed_otherwise and any(each.outcome == "inconclusive" for each in self._records)

    def take(self, report: Any) -> None:  # noqa: ANN401  # a report with attributes of ours, or without
        """Keep the record or the reason that a report carries."""
        outcome = report.fa_record["outcome"] if hasattr(report, "fa_record") else None
        self._failed_otherwise |= bool(report.failed) and outcome != "inconclusive"
        if hasattr(report, "fa_record"):
            from pytest_fa.records.read import read_record  # noqa: PLC0415  # only runs with kernels need it

            record = read_record(report.fa_record)
            self._records.append(record)
            self._did_case |= self._was_run(record) and not report.fa_companion
            if record.outcome == "not_measured":
                self._not_run["case"][record.message] += 1
            try:
                self._log.append(record)
            except OSError as problem:
                self._problem = problem
        elif hasattr(report, "fa_not_run") and not report.fa_companion:
            what, reason = report.fa_not_run
            self._not_run[what][reason] += 1

    def note_collect(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is a failure of its own."""
        self._failed_otherwise |= report.failed

    def finish(self) -> None:
        """Write the profiles that were asked for, and what a step of GitHub's is to show."""
        if self._records and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
            from pytest_fa.report.tool_lines import append_summary  # noqa: PLC0415

            append_summary(self._records, Path(summary))
        if self._options.save and self._records:
            from pytest_fa.records.log import save_records  # noqa: PLC0415

            good = [each for each in self._records if each.gate or (each.outcome == "ok" and each.kind != "build")]
            try:
                self._saved = save_records(good, self._options.records_folder, self._options.rootdir)
            except OSError as problem:
                self._problem = problem

    def write(self, terminal: pytest.TerminalReporter) -> None:
        """The table and the lines below it."""
        if self._records:
            from pytest_fa.records.log import stale_variants  # noqa: PLC0415
            from pytest_fa.report.table import notes  # noqa: PLC0415
            from pytest_fa.report.tool_lines import ablation_lines, profile_lines  # noqa: PLC0415

            self._write_table(terminal)
            self._write_gates(terminal)
            for line in (*ablation_lines(self._records), *profile_lines(self._records), *notes(self._records)):
                terminal.write_line(line)
            if terminal.config.getoption("numprocesses", None):
                terminal.write_line(
                    "pytest-benchmark switches itself off under xdist: these times are in our records alone"
                )
            if self._problem is None:
                terminal.write_line(f"records: {self._short(self._log.path)}")
            else:
                terminal.write_line(f"fa: records were lost: {self._problem}", red=True)
            for path in self._saved:
                terminal.write_line(f"saved: {self._short(path)}")
            for name in stale_variants(self._records, self._options.records_folder):
                terminal.write_line(
                    f"stale: the saved records of {name} were measured with other machine code (--fa-save)"
                )
        if self.nothing_ran:
            reasons = self._not_run["case"] + self._not_run["build"]
            terminal.write_line(f"fa: nothing ran: all that was selected was skipped ({reasons.total()})", red=True)
            for reason, count in reasons.most_common(5):
                terminal.write_line(f"  {count} x {reason}", red=True)

    def _write_table(self, terminal: pytest.TerminalReporter) -> None:
        """What was built, checked and timed: a row for each variant and shape; the self-test has a matrix."""
        from pytest_fa.records.ceilings import read_ceilings  # noqa: PLC0415
        from pytest_fa.report.table import FOOTNOTE, make_rows, render, render_matrix  # noqa: PLC0415

        width = terminal._tw.fullwidth  # noqa: SLF001
        faults = [record for record in self._records if record.kind == "selftest"]
        terminal.section("self-test: kernels and what found them" if faults else "attention kernels")
        if faults:
            terminal.write_line(render_matrix(faults, max(width, MATRIX_WIDTH)))
        elif self._options.static:
            self._write_static(terminal, width)
        else:
            ceilings = read_ceilings(self._options.records_folder, self._records[0].environment.gpu)
            rows = make_rows(self._records, ceilings)
            terminal.write_line(f"{render(rows, width, color=terminal.hasmarkup)}\n{FOOTNOTE}" if rows else "")

    def _write_static(self, terminal: pytest.TerminalReporter, width: int) -> None:
        """What the machine code says, with the launches that saved records know."""
        from pytest_fa.records.log import saved_launches  # noqa: PLC0415  # only --fa-static needs these
        from pytest_fa.report.static_code import static_text  # noqa: PLC0415

        names = [record.variant for record in self._records]
        terminal.write_line(static_text(self._records, saved_launches(self._options.records_folder, names), width))

    def _write_gates(self, terminal: pytest.TerminalReporter) -> None:
        """Each gate; one without a verdict in full, since pytest shows the text of failures alone."""
        from pytest_fa.report.failure import failure_text  # noqa: PLC0415  # only runs with records need these
        from pytest_fa.report.gate_lines import gate_lines  # noqa: PLC0415

        for record in self._records:
            if record.outcome == "inconclusive":
                terminal.write_line(failure_text(record), yellow=True)
            elif record.gate:
                for line in gate_lines(record.variant, record.gate):
                    terminal.write_line(line, red=record.gate.verdict == "FAIL", green=record.gate.verdict == "PASS")

    @functools.cached_property
    def _log(self) -> RecordLog:
        from pytest_fa.records.log import RecordLog  # noqa: PLC0415

        return RecordLog(self._options.artifacts)

    def _short(self, path: Path) -> str:
        root = self._options.rootdir
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

    @staticmethod
    def _was_run(record: Record) -> bool:
        return record.kind not in ("build", "property") and record.outcome not in ("not_built", "not_measured")


def list_variants(catalog: Catalog) -> None:
    """`--fa-list`: every variant with its role, what it takes and what it is for; broken manifests last."""
    from rich import box  # noqa: PLC0415  # only where it is asked for
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table("variant", "role", "entry", "architectures", "dtypes", "head_dim", box=box.SIMPLE_HEAD)
    table.add_column("step", overflow="fold")
    for each in catalog.variants.values():
        dims = ", ".join(map(str, each.supports.head_dim))
        arches = ", ".join(each.arch) or ", ".join(each.supports.device)
        dtypes = ", ".join(each.supports.dtype)
        role = each.role if each.computes == "attention" else f"{each.role} of {each.computes}"
        table.add_row(each.name, role, each.entry.kind, arches, dtypes, dims, escape(each.step))
    console = Console(width=max(Console().width, LIST_WIDTH))
    console.print(table)
    for broken in catalog.broken.values():
        console.print(f"broken: {broken.problem}", style="red", markup=False)
