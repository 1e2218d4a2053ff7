"""Keeps the records of a run, and writes the table and the lines below it to the terminal."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fa.plugin.record_file import RunFile

if TYPE_CHECKING:
    from pytest_fa.options.options import Options
    from pytest_fa.records.ceilings import Ceilings
    from pytest_fa.records.record import Record
    from pytest_fa.records.saved import SavedRecords
    from pytest_fa.session.baseline_choice import LeftOut
    from pytest_fa.table.answer import RunFacts
    from pytest_fa.table.layout import TextLine


MATRIX_WIDTH = 200
QUIETEST = -2  # -qq
INCONCLUSIVE_STATUS = 10  # exit status if a gate has no verdict and nothing else failed
UNREPORTED = "tests were skipped because of a fault, but no test failed with it"


class Results:
    """The records of one run, and the reasons of the tests that have none."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.file = RunFile(options.artifacts)
        self._records: list[Record] = []
        self._reused: list[LeftOut] = []  # baselines whose times of an earlier run stand for new ones
        self._not_run: dict[str, Counter[str]] = {"build": Counter(), "case": Counter()}
        self._any_case_ran = False
        self._other_failure = False  # a failure other than a gate without a verdict
        self._any_failed = self._any_already_reported = False
        self._failed_tests = 0  # those that failed without the record of a failure
        self._failed_files = 0  # those that pytest could not collect
        self._saved: list[Path] = []
        self.report_problem = ""  # why --fa-html could not be written

    @property
    def shown_records(self) -> list[Record]:
        """The records of this run, and those of earlier runs that stand for new ones."""
        return [*self._records, *(each.recent for each in self._reused if each.recent)]

    @property
    def nothing_ran(self) -> bool:
        """Whether tests were selected but none ran: no case got past its build, or nothing was built."""
        no_case_ran = bool(self._not_run["case"]) and not self._any_case_ran
        return no_case_ran or (bool(self._not_run["build"]) and not self._records)

    @property
    def is_inconclusive(self) -> bool:
        """Whether gates without a verdict are the only failures of this run."""
        return not self._other_failure and any(each.outcome == "inconclusive" for each in self._records)

    @property
    def is_fault_unreported(self) -> bool:
        """Whether tests were skipped because another test should fail with their fault, and none has failed."""
        return self._any_already_reported and not self._any_failed

    def exit_status(self, status: int) -> int:
        """The exit status of a run that would have this one.

        A run in which nothing ran, records were lost, or no test failed with a fault that skipped others, has failed.
        """
        is_bad = self.nothing_ran or self.file.is_bad or self.is_fault_unreported or self.report_problem
        if is_bad and status == pytest.ExitCode.OK:
            return pytest.ExitCode.TESTS_FAILED
        is_undecided = self.is_inconclusive and not self.file.is_bad and status == pytest.ExitCode.TESTS_FAILED
        return INCONCLUSIVE_STATUS if is_undecided else status

    def take(self, report: Any) -> None:  # noqa: ANN401  # a report with or without the attributes of `attach`
        """Keep the record of a report, or the reason why it has none."""
        outcome = report.fa_record["outcome"] if hasattr(report, "fa_record") else None
        self._other_failure |= bool(report.failed) and outcome != "inconclusive"
        self._any_failed |= bool(report.failed)
        self._any_already_reported |= getattr(report, "fa_already_reported", False)
        self._failed_tests += bool(report.failed) and outcome in (None, "ok", "not_measured")
        if hasattr(report, "fa_record"):
            self._take_record(report)
        elif hasattr(report, "fa_not_run") and not report.fa_companion:
            kind, reason = report.fa_not_run
            self._not_run[kind][reason] += 1

    def _take_record(self, report: Any) -> None:  # noqa: ANN401  # a report with the attributes of `attach`
        """Keep a record and append it to the run's file.  It is lost if a figure is out of range, or if this fails."""
        from pytest_fa.records.read import read_record  # noqa: PLC0415  # only runs with kernels need it

        try:
            record = read_record(report.fa_record)
        except ValueError as problem:
            self.file.lost, self._any_case_ran = f"{report.fa_record['id']}: {problem}", True
            return
        self._records.append(record)
        self._any_case_ran |= self._has_run(record) and not report.fa_companion
        if record.outcome == "not_measured":
            self._not_run["case"][record.message] += 1
        self.file.append(record)

    def note_collect(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be collected as a failure."""
        self._other_failure |= report.failed
        self._failed_files += report.failed

    def finish(self, config: pytest.Config) -> None:
        """Save the records with `--fa-save`, append the run to GitHub's step summary, and write `--fa-html`."""
        self.file.compare(config)
        if self._records:
            from pytest_fa.plugin.left_out import reused_times  # noqa: PLC0415  # only runs with records need it

            self._reused = reused_times(config, self._records)
        if self._records and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
            from pytest_fa.features.github.step_summary import append_summary  # noqa: PLC0415

            append_summary(self._records, self._ceilings[0], Path(summary))
        if self._options.save and self._records:
            from pytest_fa.errors import FaError  # noqa: PLC0415
            from pytest_fa.records.log import save_records  # noqa: PLC0415

            to_save = [each for each in self._records if _is_saved(each)]
            try:
                self._saved = save_records(to_save, self._options.records_folder, self._options.rootdir)
            except (OSError, FaError) as problem:
                self.file.lost = str(problem)
        if self._options.html and self._records:
            from pytest_fa.features.html.html_file import write_html  # noqa: PLC0415  # only with --fa-html

            self.report_problem = write_html(self._records, self._options, self._facts(config))

    @property
    def html(self) -> str:
        """The table of the run for the page of pytest-html; empty without records."""
        from pytest_fa.features.html.html_page import table_html  # noqa: PLC0415  # only with --html

        return table_html(self._records, self._ceilings[0]) if self._records else ""

    def annotate(self, terminal: pytest.TerminalReporter) -> None:
        """Write GitHub's annotations: one for each variant and fault, and one if nothing ran or records were lost."""
        from pytest_fa.features.github.annotations import annotation_lines, command  # noqa: PLC0415
        from pytest_fa.plugin.state import session_of  # noqa: PLC0415  # only on GitHub

        failed = [each for each in self._records if each.outcome != "not_measured" or self._options.ncu_strict]
        workspace = Path(os.environ.get("GITHUB_WORKSPACE") or self._options.rootdir)
        lines = annotation_lines(failed, session_of(terminal.config).run_plan.catalog, workspace) if failed else []
        if self.is_fault_unreported:
            lines.append(command("error", "unreported fault", UNREPORTED))
        if self.nothing_ran:
            reasons = (self._not_run["case"] + self._not_run["build"]).most_common(5)
            lines.append(command("error", "no kernel ran", "\n".join(f"{n} x {reason}" for reason, n in reasons)))
        if self.file.is_bad:
            lines.append(command("error", "records were lost", self.file.lost or self.file.changed))
        for line in lines:
            terminal.write_line(line)

    def write(self, terminal: pytest.TerminalReporter) -> None:
        """Write the table and the lines below it."""
        if self._records:
            from pytest_fa.plugin.left_out import left_out_of_table  # noqa: PLC0415
            from pytest_fa.plugin.state import session_of  # noqa: PLC0415  # only runs with records need these
            from pytest_fa.table.rows import notes  # noqa: PLC0415
            from pytest_fa.table.slowest_stages import slowest_stage_lines  # noqa: PLC0415
            from pytest_fa.table.tool_lines import ablation_lines, profile_lines  # noqa: PLC0415
            from pytest_fa.table.unjudged_lines import unjudged_lines  # noqa: PLC0415

            self._write_table(terminal)
            self._write_gates(terminal)
            unjudged = unjudged_lines(self._records, session_of(terminal.config).run_plan.plan, self._options)
            left_out = left_out_of_table(terminal.config, self._records)
            tools = (*ablation_lines(self._records), *profile_lines(self._records))
            for line in (*tools, *notes(self._records), *left_out, *unjudged):
                terminal.write_line(line)
            if terminal.config.getoption("numprocesses", None):
                terminal.write_line(
                    "pytest-benchmark is disabled under pytest-xdist; these times are only in the records"
                )
            if terminal.config.get_verbosity() > 0:
                for line in slowest_stage_lines(self._records, session_of(terminal.config).builds.seconds):
                    terminal.write_line(line)
            self._write_files(terminal)
        self.file.write(terminal)
        if self.report_problem:
            terminal.write_line(f"fa: --fa-html was not written: {self.report_problem}", red=True)
        if self.is_fault_unreported:
            terminal.write_line(f"fa: {UNREPORTED}", red=True)
        if self.nothing_ran:
            reasons = self._not_run["case"] + self._not_run["build"]
            count = reasons.total()
            what = "the sweep has not ended" if self._options.sweep else "nothing ran"
            terminal.write_line(
                f"fa: {what}: {count} selected {'tests were' if count != 1 else 'test was'} skipped", red=True
            )
            for reason, count in reasons.most_common(5):
                terminal.write_line(f"  {count} x {reason}", red=True)

    def end(self, config: pytest.Config) -> None:
        """Write beside the records what was written."""
        self.file.end(config)

    def write_answer(self, terminal: pytest.TerminalReporter) -> None:
        """Write the answer of the run and the next command, below pytest's own last line."""
        if self._records:
            from pytest_fa.table.answer import answer_lines  # noqa: PLC0415

            lines = answer_lines(self.shown_records, self._facts(terminal.config))
            _write_lines(terminal, lines[: 1 if terminal.config.get_verbosity() <= QUIETEST else None])

    def _facts(self, config: pytest.Config) -> RunFacts:
        """What the answer needs beside the records."""
        from pytest_fa.table.answer import RunFacts  # noqa: PLC0415

        ((why_not_run, _),) = self._not_run["case"].most_common(1) or (("", 0),)
        are_saved = any(config.getoption(name, None) for name in ("benchmark_save", "benchmark_autosave"))
        return RunFacts(
            rerun=self._options.rerun,
            selection=self._options.selection,
            why_not_run=why_not_run,
            failed_tests=self._failed_tests,
            failed_files=self._failed_files,
            has_failed=self.nothing_ran or self.file.is_bad,
            is_static=self._options.static,
            saves_times=config.pluginmanager.hasplugin("benchmark") and not are_saved,
        )

    def _write_files(self, terminal: pytest.TerminalReporter) -> None:
        """Write where the records are, which saved records are stale, and what cannot be read."""
        if not self.file.is_bad:
            terminal.write_line(f"records: {self._relative(self.file.log.path)}")
        if self._options.html and not self.report_problem:
            terminal.write_line(f"report: {self._relative(self._options.html)}")
        for path in self._saved:
            kept = next((len(file.bad_lines) for file in self._saved_records.incomplete if file.path == path), 0)
            lines = f" (with {kept} earlier line{'s' * (kept != 1)} that cannot be read)" if kept else ""
            terminal.write_line(f"saved: {self._relative(path)}{lines}")
        for name in self._saved_records.stale_variants(self._records):
            terminal.write_line(
                f"stale: the saved records of {name} were measured with different machine code; --fa-save replaces them"
            )
        for file in self._saved_records.incomplete:
            terminal.write_line(f"fa: {self._relative(file.path)}: {file.complaint}", yellow=True)
        for problem in filter(None, (self._ceilings[1], self._noise_problem)):
            terminal.write_line(f"fa: {problem}", yellow=True)

    def _write_table(self, terminal: pytest.TerminalReporter) -> None:
        """Write the table of the run: one row for each variant and shape, or for each kernel of the self-test."""
        from pytest_fa.features.selftest.exploit_lines import exploit_lines  # noqa: PLC0415
        from pytest_fa.table.rows import render_matrix  # noqa: PLC0415

        width = terminal._tw.fullwidth  # noqa: SLF001
        faults = [record for record in self._records if record.kind == "selftest"]
        terminal.section("self-test: kernels and the checks that rejected them" if faults else "attention kernels")
        if faults:
            terminal.write_line(render_matrix(faults, max(width, MATRIX_WIDTH)))
            for line in exploit_lines(faults):
                terminal.write_line(line)
        elif self._options.static:
            self._write_static(terminal, width)
        else:
            self._write_rows(terminal, width)

    def _write_rows(self, terminal: pytest.TerminalReporter, width: int) -> None:
        """Write the rows of variants and shapes; with -v all of them, and what the columns mean."""
        from pytest_fa.table.layout import LEGEND, LEGEND_HINT, table_lines  # noqa: PLC0415
        from pytest_fa.table.rows import claim_lines, make_groups, property_lines  # noqa: PLC0415

        is_verbose = terminal.config.get_verbosity() > 0
        ages = {(each.variant, each.shape_id): each.age_seconds for each in self._reused}
        groups = make_groups(self.shown_records, self._ceilings[0], ages)
        _write_lines(terminal, table_lines(groups, width, every_row=is_verbose))
        counts = (*claim_lines(self._records), *property_lines(self._records))
        for line in (*counts, *(LEGEND if is_verbose else [LEGEND_HINT])) if groups else ():
            terminal.write_line(line)

    def _write_static(self, terminal: pytest.TerminalReporter, width: int) -> None:
        """Write the tables of `--fa-static`, with the launches of the saved records."""
        from pytest_fa.table.static_code import static_text  # noqa: PLC0415  # only --fa-static needs it

        terminal.write_line(static_text(self._records, self._saved_records.launches(), width))

    def _write_gates(self, terminal: pytest.TerminalReporter) -> None:
        """Write the lines of each gate; for a gate without a verdict the whole text, which pytest does not show."""
        from pytest_fa.features.gate.gate_lines import gate_lines  # noqa: PLC0415
        from pytest_fa.table.failure import failure_text  # noqa: PLC0415  # only runs with records need these

        for record in self._records:
            if record.outcome == "inconclusive":
                terminal.write_line(f"{record.id}: {failure_text(record)}", yellow=True)
            elif record.gate:
                for line in gate_lines(record.variant, record.gate):
                    terminal.write_line(line, red=record.gate.verdict == "FAIL", green=record.gate.verdict == "PASS")

    @functools.cached_property
    def _saved_records(self) -> SavedRecords:
        """The saved records of this run's variants, after `--fa-save` has written its own."""
        from pytest_fa.records.saved import SavedRecords  # noqa: PLC0415

        return SavedRecords(self._options.records_folder, [record.variant for record in self._records])

    @functools.cached_property
    def _ceilings(self) -> tuple[Ceilings | None, str]:
        """The GPU's saved ceilings, if there are any, and the reason if their file cannot be read."""
        from pytest_fa.records.ceilings import read_ceilings  # noqa: PLC0415
        from pytest_fa.records.files import try_to_read  # noqa: PLC0415

        gpu = self._records[0].environment.gpu
        return try_to_read(lambda: read_ceilings(self._options.records_folder, gpu))

    @property
    def _noise_problem(self) -> str:
        """The reason why the GPU's noise, which gates use, cannot be read; empty if it can, and without a gate."""
        from pytest_fa.features.gate.noise import read_noise  # noqa: PLC0415
        from pytest_fa.records.files import try_to_read  # noqa: PLC0415

        gpu = next((record.environment.gpu for record in self._records if record.kind == "gate"), "")
        return "" if gpu == "" else try_to_read(lambda: read_noise(self._options.records_folder, gpu))[1]

    def _relative(self, path: Path) -> str:
        root = self._options.rootdir
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

    @staticmethod
    def _has_run(record: Record) -> bool:
        return record.kind not in ("build", "property") and record.outcome not in ("not_built", "not_measured")


def _write_lines(terminal: pytest.TerminalReporter, lines: list[TextLine]) -> None:
    for line in lines:
        terminal.write_line(line.text, **({line.style: True} if line.style else {}))


def _is_saved(record: Record) -> bool:
    """Whether `--fa-save` saves a record: every gate, and what is right, but no build and no timing without a time.

    With `--benchmark-disable` nothing is timed, and such a record would replace a saved time.
    """
    is_untimed = record.kind == "speed" and record.speed is None
    return record.gate is not None or (record.outcome == "ok" and record.kind != "build" and not is_untimed)
