"""Run the shipped suite for one variant, under a configuration that nothing beside the kernels can change.

pytest runs in this process, with an ini file of its own.  It reads no conftest.py, loads no plugin but this package's,
and takes no options from the environment.  The verdict and the exit status come from the records, not from pytest.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pytest_fa
from pytest_fa import plugin
from pytest_fa.catalog.own_tolerance import DEFAULT, own_tolerance
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.features.judge_command import conclude
from pytest_fa.features.judge_command.conclude import RunResult
from pytest_fa.features.judge_command.document import EXIT_STATUSES, VERSION, JudgedChecks, JudgeDocument, Status
from pytest_fa.features.judge_command.question import Question, selected_variant
from pytest_fa.host.resident import PLACE as RESIDENT_PLACE
from pytest_fa.options.command_line import JUDGE_INI, SUITE_FILES
from pytest_fa.plugin.record_file import RunFile
from pytest_fa.plugin.state import RECEIVER
from pytest_fa.processes import forbid_attaching
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable, printable_struct
from pytest_fa.table.unjudged_lines import unjudged_lines

TESTS = ("test_build", "test_correct", "test_property", "test_profile", "test_gate")
OWN_VARIABLES = "PYTEST_FA_"  # the environment variables of pytest that stay
FORWARDED_FLAG = r"--fa-(gate|tolerance|suite|case|kernels|watchdog|cache|no-build)\b"  # an option of both commands
UNUSABLE_STATUSES = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
DROPPED_VARIABLES = ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS")


def judge_variant(question: Question) -> JudgeDocument:
    """Judge and gate the variant; return the document."""
    start, rootdir = time.monotonic(), Path.cwd()
    forbid_attaching()
    try:
        variant, run_plan = selected_variant(question, rootdir)
    except FaError as problem:
        return document_of_usage(question, str(problem), time.monotonic() - start)
    _isolate()
    receiver = Receiver(variant)
    with _stdout_to_stderr():
        pytest_status = pytest.main(_pytest_arguments(question, variant, rootdir), [plugin, receiver])
    path, run = receiver.path, receiver.result(pytest_status)
    status, reason = conclude.conclude(variant, run)
    document = _document(question, variant, run, status, reason, path, time.monotonic() - start)
    if run.failure is None:
        lines = unjudged_lines(run.records, run_plan.plan, run_plan.options)
        document = msgspec.structs.replace(document, not_judged=tuple(lines))
    return printable_struct(document)


def document_of_usage(question: Question, problem: str, seconds: float = 0.0) -> JudgeDocument:
    """The document of a command line that cannot be used; the problem names the options of this command."""
    text = re.sub(FORWARDED_FLAG, r"--\1", problem.replace("--fa-variant: ", ""))
    return _document_without_run(question, Status.USAGE, printable(text), seconds)


class Receiver:
    """Takes the report of every test from the plugin, and keeps the records of one variant."""

    __name__ = RECEIVER  # under which pytest's plugin manager knows it

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._records: list[Record] = []
        self._count = 0  # of all records, also those of other variants
        self._not_run: Counter[str] = Counter()
        self._problem = self._problem_at_end = ""
        self.path: Path | None = None  # of the record file

    def take(self, report: Any) -> None:  # noqa: ANN401  # a report with or without the attributes of the plugin
        """Keep the record of a report, or why it has none."""
        if hasattr(report, "fa_record"):
            self._take_record(report.fa_record)
        elif report.failed:
            self._problem = self._problem or f"{report.nodeid}: {_last_line(report)}"
        elif hasattr(report, "fa_not_run") and not report.fa_companion:
            self._not_run[report.fa_not_run[1]] += 1

    def end(self, file: RunFile) -> None:
        """Take what became of the record file; the plugin calls it when all kernels have ended."""
        if file.log.count:
            self.path = file.log.path
        if file.is_bad:
            self._problem_at_end = f"records were lost: {file.lost}" if file.lost else file.changed
        elif file.log.count != self._count:
            self._problem_at_end = f"{self._count} records were made, and {file.log.count} were written"

    def result(self, pytest_status: int) -> RunResult:
        """What the run gave.  Records that are not in the file are a problem, and so is an error of pytest itself."""
        problem = self._problem_at_end or self._problem
        if pytest_status in UNUSABLE_STATUSES:
            problem = problem or f"pytest ended with exit status {pytest_status}"
        return RunResult(tuple(self._records), self._not_run, problem)

    def _take_record(self, content: dict[str, Any]) -> None:
        try:
            record = read_record(content)
        except ValueError as problem:
            self._problem = self._problem or f"{content.get('id')}: {problem}"
            return
        self._count += 1
        if record.variant == self._variant.name:
            self._records.append(record)


def _last_line(report: Any) -> str:  # noqa: ANN401  # as above
    return (str(report.longrepr).strip().splitlines() or ["it failed"])[-1]


# -- the configuration ------------------------------------------------------------------------------------------------


def _isolate() -> None:
    """Drop the environment variables that would configure pytest or Python besides, and use no resident server.

    Another process of this user, such as a kernel of an earlier run, may have taken the place of that server.
    """
    for name in [each for each in os.environ if each.startswith("PYTEST_") and not each.startswith(OWN_VARIABLES)]:
        del os.environ[name]
    for name in DROPPED_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", RESIDENT_PLACE: "off"}


def _pytest_arguments(question: Question, variant: Variant, rootdir: Path) -> list[str]:
    tests = [f"{SUITE_FILES['test_attention.py']}::{test}" for test in TESTS if test != "test_profile" or question.ncu]
    return [
        *("-c", str(JUDGE_INI), f"--rootdir={rootdir}", "--noconftest", "-p", "no:cacheprovider", "--maxfail=1"),
        *("--color=no", "--fa-baselines=all", *question.words_for_pytest(variant.name), "--pyargs", *tests),
    ]


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what is written to standard output to standard error: the document alone is written to the former."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


# -- the document -----------------------------------------------------------------------------------------------------


def _document(
    question: Question, variant: Variant, run: RunResult, status: Status, reason: str, path: Path | None, seconds: float
) -> JudgeDocument:
    device, failure = variant.device_for(gpu=find_gpu() is not None), run.failure
    ratios = conclude.ratios_of(run.gate)
    is_one_case = failure is not None and failure.case is not None and failure.kind in ("correct", "gate")
    record = run.records[-1] if run.records else None
    return msgspec.structs.replace(
        _document_without_run(question, status, reason, seconds),
        variant=variant.name,
        device=device,
        ratio=conclude.largest(ratios),
        ratios=ratios,
        checks=conclude.checks_of(run),
        failure=conclude.failure_of(failure),
        times=conclude.times_of(variant, run.gate),
        bottlenecks=conclude.bottlenecks_of(run),
        tolerance=question.policy,
        own_tolerance=own_tolerance(variant),
        next_steps=(
            *_tolerance_step(variant, status, question.policy),
            *conclude.next_steps(question, status, run, on_gpu=device == "cuda"),
        ),
        rerun_command=question.rerun_command(failure.case.id if is_one_case and failure and failure.case else ""),
        records=os.path.relpath(path) if path else None,
        environment=record.environment if record else None,
        source=record.source if record else None,
    )


def _tolerance_step(variant: Variant, status: Status, policy: str) -> tuple[str, ...]:
    """What to do about a wrong result if the manifest asks for another policy than the caller's."""
    if status != Status.WRONG or variant.tolerance in (policy, DEFAULT):
        return ()
    return (f"its manifest asks for another tolerance policy; if you accept that: --tolerance={variant.tolerance}",)


def _document_without_run(question: Question, status: Status, reason: str, seconds: float) -> JudgeDocument:
    try:
        ratio = question.ratio
    except FaError:
        ratio = 1.0
    return JudgeDocument(
        schema_version=VERSION,
        status=status,
        exit_status=EXIT_STATUSES[status],
        reason=reason,
        variant=None,
        device=None,
        required_ratio=ratio,
        ratio=None,
        ratios=(),
        checks=JudgedChecks(0, 0, {}),
        not_judged=(),
        failure=None,
        times=(),
        bottlenecks=(),
        next_steps=conclude.next_steps(question, status, RunResult(()), on_gpu=False),
        rerun_command=question.rerun_command(),
        seconds=seconds,
        records=None,
        environment=None,
        source=None,
        pytest_fa=pytest_fa.__version__,
    )
