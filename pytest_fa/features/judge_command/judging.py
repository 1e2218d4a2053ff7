"""Judge one variant under a configuration that nothing beside the kernels can change, and write the document.

pytest takes no part: no ini file, conftest.py or plugin is read.  The verdict and the exit status come from the
records.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import msgspec

import pytest_fa
from pytest_fa.catalog.own_tolerance import DEFAULT, own_tolerance
from pytest_fa.catalog.own_truth import of_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.features.judge_command import conclude
from pytest_fa.features.judge_command.conclude import RunResult
from pytest_fa.features.judge_command.document import EXIT_STATUSES, VERSION, JudgedChecks, JudgeDocument, Status
from pytest_fa.features.judge_command.judge_run import run_variant
from pytest_fa.features.judge_command.question import Question, selected_variant
from pytest_fa.host.resident import PLACE as RESIDENT_PLACE
from pytest_fa.processes import forbid_attaching
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.text import printable, printable_struct
from pytest_fa.table.unjudged_lines import unjudged_lines

FORWARDED_FLAG = r"--fa-(gate|tolerance|suite|case|kernels|watchdog|cache|no-build)\b"  # an option of both commands
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
    run, kept = run_variant(run_plan.options, variant, question.ratio)
    status, reason = conclude.conclude(variant, run)
    document = _document(question, variant, run, status, reason, kept.path, time.monotonic() - start)
    if run.failure is None:
        lines = unjudged_lines(run.records, run_plan.plan, run_plan.options)
        document = msgspec.structs.replace(document, not_judged=tuple(lines))
    return printable_struct(document)


def document_of_usage(question: Question, problem: str, seconds: float = 0.0) -> JudgeDocument:
    """The document of a command line that cannot be used; the problem names the options of this command."""
    text = re.sub(FORWARDED_FLAG, r"--\1", problem.replace("--fa-variant: ", ""))
    return _document_without_run(question, Status.USAGE, printable(text), seconds)


def _isolate() -> None:
    """Drop the environment variables that would configure other Python processes, and use no resident server.

    Another process of this user, such as a kernel of an earlier run, may have taken the place of that server.
    """
    for name in DROPPED_VARIABLES:
        os.environ.pop(name, None)
    os.environ[RESIDENT_PLACE] = "off"


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
        own_tolerance="; ".join(filter(None, (own_tolerance(variant), _own_truth(variant)))),
        next_steps=(
            *_tolerance_step(variant, status, question.policy),
            *_truth_step(variant, status),
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


def _truth_step(variant: Variant, status: Status) -> tuple[str, ...]:
    """What to do about a wrong result if the manifest names functions with which its kernel is to be compared."""
    if status != Status.WRONG or not _own_truth(variant):
        return ()
    command = shlex.join(["pytest", f"--fa-variant={variant.name}"])
    return (f"judge compares with attention, never with a truth of the manifest; {command} uses that",)


def _own_truth(variant: Variant) -> str:
    return f"truth: {own.title}" if (own := of_manifest(variant)) else ""


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
