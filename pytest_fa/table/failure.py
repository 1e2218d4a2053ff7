"""The text of a failed test: the cause, every bound, the places of the errors, and the rerun command."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fa.attention import parts
from pytest_fa.attention.scores import AXES, Computes
from pytest_fa.records.added import added_to
from pytest_fa.records.checks import WITH_POISON, Bound, Check, CrossCheck, Diagnosis, Index, Repeats
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record

ADVICE = {Outcome.UNSUPPORTED: "the manifest supports this case; state in `supports` what the kernel refuses"}


def failure_text(record: Record, of_features: Iterable[str] = ()) -> str:
    """The text of a failed test: the cause in one line, then the details, then the rerun command.

    `of_features` are the details that features add.
    """
    first_line, *details = record.message.splitlines() or [""]
    cause = record.diagnosis.cause.removeprefix("wrong ") if record.diagnosis else ""
    lines = [f"{record.outcome.headline}{first_line}{f': {cause}' if cause else ''}", *details]
    lines += [f"  {ADVICE[record.outcome]}"] if record.outcome in ADVICE else []
    stages = ", ".join(f"{stage.name} {stage.state}" for stage in record.stages)
    lines.append(f"  stages: {stages}")
    lines += [f"  {line}" for line in of_features]
    lines += [f"  {line}" for added in added_to(record) for line in added.details()]
    computes = record.case.computes if record.case else "attention"
    if record.check is not None:
        lines += check_lines(record.check, computes)
    if record.repeats is not None:
        lines.append(repeats_line(record.repeats, computes))
    if record.diagnosis is not None:
        lines += _diagnosis_lines(record.diagnosis)
    lines.append(f"  rerun: {record.rerun_command}")
    return "\n".join(lines)


def check_lines(check: Check, computes: Computes = "attention") -> list[str]:
    """The lines of one check: policy, bounds, number of bad elements, first and worst element."""
    against = f", {check.against}" if check.against else ""
    lines = [f"  policy {check.policy}{against}:", *(_bound_line(bound) for bound in check.bounds)]
    max_error, rms_error = check.same_precision_max_error, check.same_precision_rms_error
    lines.append(f"  same-precision reference: max {max_error:.3e}, rms {rms_error:.3e}")
    lines.append(f"  elements: {check.bad_count} of {check.element_count} bad, {check.nonfinite_count} NaN or Inf")
    if check.first_bad is not None:
        lines.append(f"  first bad: {_place(check.first_bad, computes)}")
    if check.worst is not None and check.worst_want is not None:
        got = "not finite" if check.worst_got is None else f"{check.worst_got:.6g}"
        lines.append(f"  worst: {_place(check.worst, computes)}: got {got}, want {check.worst_want:.6g}")
    for name, rows in check.rows.items():
        (batch, head, query), title = rows.worst, parts.title_of(name)
        lines.append(f"  {title}: {rows.bad_count} of {rows.row_count} rows bad")
        place = f"batch {batch}, head {head}, query {query}"
        lines.append(f"  worst {title}: {place}: got {rows.worst_got}, want {rows.worst_want}")
    return lines


def repeats_line(repeats: Repeats, computes: Computes = "attention") -> str:
    """The number of repeats, how many of them differ, and where.  A difference means that the kernel has a race.

    If the last calls agree, they show that the kernel keeps state between calls.

    Equal repeats exclude rare faults only down to a rate, which the line names.
    """
    missing = repeats.why_no_smem_poison
    with_poison = "with" if repeats.count <= WITH_POISON else "in part with"
    memory = f"{with_poison} NaN-filled shared memory"
    if missing is not None:
        memory = f"without NaN-filled shared memory ({missing})"
    if repeats.gradients_differing:
        return f"  repeats: {repeats.count} {memory}, {_of_gradients(repeats)}"
    for name, differing in repeats.rows_differing.items():
        if differing and not repeats.differing:
            changed = f"the {parts.title_of(name)} of {differing} differs from the first call"
            return f"  repeats: {repeats.count} {memory}, {changed}: a race"
    if not repeats.differing or repeats.first is None:
        rate = repeats.excluded_rate
        excluded = f"; a fault in more than {100 * rate:.2g} % of the calls is excluded (95 %)" if rate else ""
        return f"  repeats: {repeats.count} {memory}, all bitwise equal{excluded}"
    changed = f"{repeats.differing} differ from the first call in {repeats.element_count} elements"
    reason = "a race" if not repeats.later_agree else "state kept between calls, since these all agree"
    return f"  repeats: {repeats.count} {memory}, {changed}, first at {_place(repeats.first, computes)}: {reason}"


def _of_gradients(repeats: Repeats) -> str:
    """Which gradients differ in how many calls, and what the equal ones exclude."""
    counts = repeats.of_gradients
    texts = [f"{name} differs from the first call in {count}" for name, count in counts.items() if count]
    if equal := " and ".join(name for name, count in counts.items() if not count):
        rate = 100 * repeats.excluded_by_count
        texts.append(f"{equal} bitwise equal; a fault in more than {rate:.2g} % of the calls is excluded (95 %)")
    return ", ".join(texts)


def _diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    lines = [f"  {line}" if index == 0 else f"    {line}" for index, line in enumerate(diagnosis.error_map)]
    lines += [f"  likely cause: {diagnosis.cause}"] if diagnosis.cause else []
    lines += [f"  cross-check: {_cross_check(each)}" for each in diagnosis.cross_checks]
    return [*lines, *([f"  {diagnosis.conclusion}"] if diagnosis.conclusion else [])]


def _cross_check(cross_check: CrossCheck) -> str:
    if cross_check.absent is not None:
        return f"{cross_check.name} did not run: {cross_check.absent}"
    error = "not finite" if cross_check.max_abs_error is None else f"max error {cross_check.max_abs_error:.3e}"
    return f"{cross_check.name} {'passed' if cross_check.passed else 'wrong'}, {error}"


def _bound_line(bound: Bound) -> str:
    value = "not finite" if bound.value is None else f"{bound.value:.3e}"
    verdict = ("holds" if bound.holds else "BROKEN") if bound.enforced else "not enforced"
    used = f", {bound.used:.0%} of the limit" if bound.used is not None and bound.allowed else ""
    return f"    {bound.name}: {value}, allowed {bound.allowed:.3e}{used}: {verdict}"


def _place(index: Index, computes: Computes) -> str:
    return ", ".join(f"{axis} {number}" for axis, number in zip(AXES[computes], index, strict=True))
