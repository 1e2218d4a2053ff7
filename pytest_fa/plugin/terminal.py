"""Keeps the records of a run, and writes the table and the lines below it to the terminal."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.catalog.select import exact_shapes
from pytest_fa.errors import FaError
from pytest_fa.options.options import Options
from pytest_fa.plugin.left_out import left_out_of_table, reused_times
from pytest_fa.plugin.record_file import RunFile
from pytest_fa.plugin.state import session_of
from pytest_fa.records.ceilings import Ceilings, read_ceilings
from pytest_fa.records.files import try_to_read
from pytest_fa.records.log import save_records, saved_path
from pytest_fa.records.outcome import UNDECIDED_STATUS, Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.saved import SavedRecords
from pytest_fa.records.standing import HiddenTime, counts_text, is_saved
from pytest_fa.session.baseline_choice import LeftOut
from pytest_fa.table.answer import RunFacts, answer_lines
from pytest_fa.table.layout import LEGEND, LEGEND_HINT, TextLine, table_lines
from pytest_fa.table.rows import claim_lines, make_groups, notes, property_lines
from pytest_fa.table.slowest_stages import slowest_stage_lines
from pytest_fa.table.tool_lines import ablation_lines
from pytest_fa.table.unjudged_lines import unjudged_lines

QUIETEST = -2  # -qq
UNJUDGED_SHOWN = 3  # claims of a variant that a line names in full without -v
UNREPORTED = "tests were skipped because of a fault, but no test failed with it"


class Results:
    """The records of one run, and the reasons of the tests that have none."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.file = RunFile(options.artifacts)
        self.records: list[Record] = []
        self.failed_records: list[Record] = []  # of tests that failed
        self._reused: list[LeftOut] = []  # baselines whose times of an earlier run stand for new ones
        self._not_run: dict[str, Counter[str]] = {"build": Counter(), "case": Counter()}
        self._not_run_at: dict[str, str] = {}  # the first reason at each shape
        self._any_case_ran = False
        self._ran_at: set[str] = set()  # the shapes of these cases
        self._other_failure = False  # a failure other than a test without a verdict
        self._any_failed = self._any_already_reported = False
        self._failed_tests = 0  # those that failed without the record of a failure
        self._failed_files = 0  # those that pytest could not collect
        self._to_save: list[Record] = []  # with --fa-save
        self._saved: list[Path] = []
        self._undone = ""  # what a feature could not do: write its file, or anything at all

    @property
    def shown_records(self) -> list[Record]:
        """The records of this run, and those of earlier runs that stand for new ones."""
        return [*self.records, *(each.recent for each in self._reused if each.recent)]

    @property
    def why_not_run(self) -> Counter[str]:
        """How often each reason kept a test from running."""
        return self._not_run["case"] + self._not_run["build"]

    @property
    def saw_kernels(self) -> bool:
        """Whether a test used kernels, or would have if it had run."""
        return bool(self.records or self.file.lost or self.why_not_run)

    @property
    def nothing_ran(self) -> bool:
        """Whether tests were selected but none ran: no case got past its build, or nothing was built."""
        no_case_ran = bool(self._not_run["case"]) and not self._any_case_ran
        return no_case_ran or (bool(self._not_run["build"]) and not self.records)

    @functools.cached_property
    def unjudged_cases(self) -> list[str]:
        """Why cases that the user named were judged by no test, though tests of them were selected."""
        names = (*self.options.chosen_cases, *self.options.named_cases)
        shapes = exact_shapes(names, self.options.dtypes) if self._not_run_at else frozenset()
        return [
            reason if shape_id in reason else f"{shape_id}: {reason}"
            for shape_id, reason in self._not_run_at.items()
            if shape_id in shapes - self._ran_at
        ]

    @property
    def is_inconclusive(self) -> bool:
        """Whether tests without a verdict are the only failures of this run."""
        return not self._other_failure and any(each.outcome == Outcome.INCONCLUSIVE for each in self.records)

    @property
    def is_fault_unreported(self) -> bool:
        """Whether tests were skipped because another test should fail with their fault, and none has failed."""
        return self._any_already_reported and not self._any_failed

    def exit_status(self, status: int) -> int:
        """The exit status of a run that would have this one.

        A run in which nothing ran, no test judged a case that was named, records were lost, or no test failed with a
        fault that skipped others, has failed.
        """
        is_bad = self.nothing_ran or self.unjudged_cases or self.file.is_bad or self.is_fault_unreported or self._undone
        if is_bad and status == pytest.ExitCode.OK:
            return pytest.ExitCode.TESTS_FAILED
        may_be_undecided = self.is_inconclusive and not self.file.is_bad and not self.unjudged_cases
        is_undecided = may_be_undecided and status == pytest.ExitCode.TESTS_FAILED
        return UNDECIDED_STATUS if is_undecided else status

    def take(self, report: Any) -> None:  # noqa: ANN401  # a report with or without the attributes of `attach`
        """Keep the record of a report, or the reason why it has none."""
        outcome = report.fa_record.outcome if hasattr(report, "fa_record") else None
        self._other_failure |= bool(report.failed) and outcome != Outcome.INCONCLUSIVE
        self._any_failed |= bool(report.failed)
        self._any_already_reported |= getattr(report, "fa_already_reported", False)
        self._failed_tests += bool(report.failed) and outcome in (None, Outcome.OK, Outcome.NOT_MEASURED)
        if hasattr(report, "fa_record"):
            self._take_record(report)
        elif hasattr(report, "fa_lost"):
            self.file.lost, self._any_case_ran = report.fa_lost, True
        elif hasattr(report, "fa_not_run") and not report.fa_companion:
            shape_id, reason = report.fa_not_run
            self._not_run["case" if shape_id else "build"][reason] += 1
            self._not_run_at.setdefault(shape_id, reason)

    def _take_record(self, report: Any) -> None:  # noqa: ANN401  # a report with the attributes of `attach`
        """Keep a record and append it to the run's file.  It is lost if this fails."""
        record: Record = report.fa_record
        self.records.append(record)
        self.failed_records += [record] if report.failed else []
        if self._has_run(record) and not report.fa_companion:
            self._any_case_ran = True
            self._ran_at |= {record.case.shape_id} if record.case else set()
        if record.outcome == Outcome.NOT_MEASURED:
            self._not_run["case"][record.message] += 1
        self.file.append(record)

    def note_collect(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be collected as a failure."""
        self._other_failure |= report.failed
        self._failed_files += report.failed

    def finish(self, config: pytest.Config) -> None:
        """Save the records with `--fa-save`, and let features write their files."""
        self.file.compare(config)
        if self.records:
            self._reused = reused_times(config, self.records)
        if self.options.save and self.records:
            self._to_save = [each for each in self.records if is_saved(each)]
            try:
                self._saved = save_records(self._to_save, self.options.records_folder, self.options.rootdir)
            except (OSError, FaError) as problem:
                self.file.lost = f"{problem}; make room there, or save them elsewhere: --fa-profiles=DIR"
        problems = config.hook.pytest_fa_finish(results=self, config=config)
        self._undone = next(filter(None, problems), "")

    def write(self, terminal: pytest.TerminalReporter) -> None:
        """Write the table and the lines below it."""
        if self.records:
            self._write_table(terminal)
            _write_lines(terminal, self._lines(terminal.config.hook.pytest_fa_lines, terminal.config))
            most = 0 if terminal.config.get_verbosity() > 0 else UNJUDGED_SHOWN
            unjudged = unjudged_lines(self.records, session_of(terminal.config).run_plan.plan, self.options, most)
            left_out = left_out_of_table(terminal.config, self.records)
            for line in (*ablation_lines(self.records), *notes(self.records), *left_out, *unjudged):
                terminal.write_line(line)
            if terminal.config.getoption("numprocesses", None):
                terminal.write_line(
                    "pytest-benchmark is disabled under pytest-xdist; these times are only in the records"
                )
            if terminal.config.get_verbosity() > 0:
                for line in slowest_stage_lines(self.records, session_of(terminal.config).builds.seconds):
                    terminal.write_line(line)
            self._write_files(terminal)
        self.file.write(terminal)
        if self._undone:
            terminal.write_line(f"fa: {self._undone}", red=True)
        if self.is_fault_unreported:
            terminal.write_line(f"fa: {UNREPORTED}", red=True)
        self._write_unjudged(terminal)

    def _write_unjudged(self, terminal: pytest.TerminalReporter) -> None:
        """Write why nothing ran, or why cases that the user named were not judged."""
        reasons = self.why_not_run
        count = reasons.total()
        tests = "tests were" if count != 1 else "test was"
        lines = [f"fa: {_not_judged(reason)}" for reason in self.unjudged_cases]
        if self.nothing_ran:
            lines = [f"fa: {self.options.why_nothing}: {count} selected {tests} skipped"]
            lines += [f"  {count} x {reason}" for reason, count in reasons.most_common(5)]
        for line in lines:
            terminal.write_line(line, red=True)

    def end(self, config: pytest.Config) -> None:
        """Write beside the records what was written."""
        self.file.end(config)

    def write_answer(self, terminal: pytest.TerminalReporter) -> None:
        """Write the answer of the run and the next command, below pytest's own last line."""
        if self.records:
            lines = answer_lines(self.shown_records, self.facts(terminal.config))
            _write_lines(terminal, lines[: 1 if terminal.config.get_verbosity() <= QUIETEST else None])
        elif self.nothing_ran:
            ((reason, _),) = self.why_not_run.most_common(1)
            terminal.write_line(_not_judged(reason), red=True)

    def facts(self, config: pytest.Config) -> RunFacts:
        """What the answer needs beside the records."""
        ((why_not_run, _),) = self._not_run["case"].most_common(1) or (("", 0),)
        are_saved = any(config.getoption(name, None) for name in ("benchmark_save", "benchmark_autosave"))
        return RunFacts(
            rerun=self.options.rerun,
            selection=self.options.selection,
            why_not_run=why_not_run,
            failed_tests=self._failed_tests,
            failed_files=self._failed_files,
            unjudged_cases=len(self.unjudged_cases),
            has_failed=self.nothing_ran or self.file.is_bad or bool(self._undone),
            is_static=self.options.static,
            saves_times=config.pluginmanager.hasplugin("benchmark") and not are_saved,
        )

    def _write_files(self, terminal: pytest.TerminalReporter) -> None:
        """Write where the records are, which saved records are stale, and what cannot be read."""
        if not self.file.is_bad:
            terminal.write_line(f"records: {self.relative(self.file.log.path)}")
        written = self._lines(terminal.config.hook.pytest_fa_file_lines, terminal.config)
        _write_lines(terminal, [line for line in written if not line.style])
        for path in self._saved:
            kept = next((len(file.bad_lines) for file in self._saved_records.incomplete if file.path == path), 0)
            lines = f" (with {kept} earlier line{'s' * (kept != 1)} that cannot be read)" if kept else ""
            saved = [each for each in self._to_save if saved_path(self.options.records_folder, each) == path]
            terminal.write_line(f"saved: {self.relative(path)}: {counts_text(saved)}{lines}")
        for hidden in self._hidden_times():
            terminal.write_line(f"fa: {hidden.sentence}", yellow=True)
        for name in self._saved_records.stale_variants(self.records):
            terminal.write_line(
                f"stale: the saved records of {name} were measured with different machine code; "
                f"--fa-save replaces those of tests that pass"
            )
        for file in self._saved_records.incomplete:
            terminal.write_line(f"fa: {self.relative(file.path)}: {file.complaint}", yellow=True)
        if self.ceilings[1]:
            terminal.write_line(f"fa: {self.ceilings[1]}", yellow=True)
        _write_lines(terminal, [line for line in written if line.style])

    def _hidden_times(self) -> list[HiddenTime]:
        """The saved times that do not count because of what this run has saved."""
        failed = {(each.variant, each.case) for each in self._to_save if self._saved and each.outcome.defect}
        names = dict.fromkeys(variant for variant, _ in failed)
        hidden = [each for name in names for each in self._saved_records.hidden_times(name)]
        return [each for each in hidden if (each.failure.variant, each.failure.case) in failed]

    def _lines(self, hook: Callable[..., list[list[TextLine]]], config: pytest.Config) -> list[TextLine]:
        """The lines of all features, in the order of the features."""
        return [line for lines in reversed(hook(results=self, config=config)) for line in lines]

    def _write_table(self, terminal: pytest.TerminalReporter) -> None:
        """Write the table of the run: one row for each variant and shape, or that of a feature."""
        width = terminal._tw.fullwidth  # noqa: SLF001
        title, lines = terminal.config.hook.pytest_fa_table(results=self, width=width) or ("attention kernels", [])
        terminal.section(title)
        for line in lines:
            terminal.write_line(line)
        if not lines and self.options.static:
            self._write_static(terminal, width)
        elif not lines:
            self._write_rows(terminal, width)

    def _write_rows(self, terminal: pytest.TerminalReporter, width: int) -> None:
        """Write the rows of variants and shapes; with -v all of them, and what the columns mean."""
        is_verbose = terminal.config.get_verbosity() > 0
        ages = {(each.variant, each.shape_id): each.age_seconds for each in self._reused}
        groups = make_groups(self.shown_records, self.ceilings[0], ages)
        _write_lines(terminal, table_lines(groups, width, every_row=is_verbose))
        counts = (*claim_lines(self.records), *property_lines(self.records))
        for line in (*counts, *(LEGEND if is_verbose else [LEGEND_HINT])) if groups else ():
            terminal.write_line(line)

    def _write_static(self, terminal: pytest.TerminalReporter, width: int) -> None:
        """Write the tables of `--fa-static`, with the launches of the saved records."""
        from pytest_fa.table.static_tables import static_text  # noqa: PLC0415  # rich, only for --fa-static

        terminal.write_line(static_text(self.records, self._saved_records.launches(), width))

    @functools.cached_property
    def _saved_records(self) -> SavedRecords:
        """The saved records of this run's variants, after `--fa-save` has written its own."""
        return SavedRecords(self.options.records_folder, [record.variant for record in self.records])

    @functools.cached_property
    def ceilings(self) -> tuple[Ceilings | None, str]:
        """The GPU's saved ceilings, if there are any, and the reason if their file cannot be read."""
        gpu = self.records[0].environment.gpu
        return try_to_read(lambda: read_ceilings(self.options.records_folder, gpu))

    def relative(self, path: Path) -> str:
        """A path from the root folder, if it is below it."""
        root = self.options.rootdir
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

    @staticmethod
    def _has_run(record: Record) -> bool:
        return record.kind not in ("build", "property") and record.outcome not in (
            Outcome.NOT_BUILT,
            Outcome.NOT_MEASURED,
        )


def _not_judged(reason: str) -> str:
    """A sentence that says that something was not judged, and why."""
    return reason if " is not judged: " in reason else f"not judged: {reason}"


def _write_lines(terminal: pytest.TerminalReporter, lines: list[TextLine]) -> None:
    for line in lines:
        terminal.write_line(line.text, **({line.style: True} if line.style else {}))
