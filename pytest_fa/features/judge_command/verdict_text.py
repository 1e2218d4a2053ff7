"""The document of `python -m pytest_fa judge` as a few lines for people."""

from __future__ import annotations

from pytest_fa.features.judge_command.document import JudgedFailure, JudgeDocument, JudgedRatio, Status
from pytest_fa.records.text import printable


def verdict_text(document: JudgeDocument) -> str:
    """The verdict, the ratios, the failure, and what to do next."""
    lines = [f"{document.variant or 'judge'}: {document.status.replace('_', ' ')} (exit status {document.exit_status})"]
    lines += [f"  {line}" for line in document.reason.splitlines()[:1]]
    if document.own_tolerance:
        lines.append(f"  judged by policy {document.tolerance}; its own manifest declares {document.own_tolerance}")
    lines += [f"  {_ratio_line(ratio)}" for ratio in document.ratios]
    lines += _check_lines(document)
    lines += [f"  {line}" for line in document.not_judged]
    lines += _failure_lines(document.failure) if document.failure else []
    lines += [f"  {each.shape}: {each.sentence}" for each in document.bottlenecks]
    lines += [f"  next: {step}" for step in document.next_steps]
    if document.status != Status.USAGE:
        lines.append(f"  rerun: {document.rerun_command}")
        lines.append(f"  {document.seconds:.0f} s; records: {document.records or 'none'}")
    return printable("\n".join(lines))


def _ratio_line(ratio: JudgedRatio) -> str:
    ends = " to ".join("unknown" if end is None else f"{end:.4f}" for end in (ratio.low, ratio.high))
    value = "unknown" if ratio.value is None else f"{ratio.value:.4f}"
    return f"{ratio.shape}: {value} x {ratio.baseline}, {100 * ratio.confidence:g} % interval {ends}"


def _check_lines(document: JudgeDocument) -> list[str]:
    checks = document.checks
    judged = checks.passed + checks.failed
    lines = [f"  checks: {checks.passed} of {judged} passed"] if judged else []
    return [*lines, *(f"  not run: {count} x {reason}" for reason, count in checks.not_run.items())]


def _failure_lines(failure: JudgedFailure) -> list[str]:
    lines = [f"  caught by: {', '.join(failure.checks)}"] if failure.checks else []
    if failure.place is not None:
        place = failure.place
        where = "" if place.first_bad is None else f", first at {', '.join(map(str, place.first_bad))}"
        lines.append(f"  wrong elements: {place.bad_count} of {place.element_count}{where} (batch, head, query, dim)")
        lines += [f"    {line}" for line in place.error_map]
    lines += [f"  likely cause: {failure.cause}"] if failure.cause else []
    return lines
