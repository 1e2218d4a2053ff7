"""The line of each variant: the weighted time of the whole mix, divided by that of the fastest baselines.

The ratio is that of the two sums.  A case without a time or a ratio of its own is never left out of them: it makes the
ratio undecided, and the line names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.workload.workload import WeightedCase
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import JUDGED_KINDS, Record
from pytest_fa.records.spread import is_clear_ratio, is_noisy, span_of_sums
from pytest_fa.records.standing import words_of
from pytest_fa.records.timing import Speed
from pytest_fa.table.baselines import baseline_name, comparable, compared_baseline
from pytest_fa.table.layout import TextLine
from pytest_fa.table.rows import NOT_ATTENTION, UNCLEAR, shown_ratio


class Term(NamedTuple):
    """What one case contributes to the sums of a variant, and of `baseline`, the fastest baseline.

    `why_no_time` says why the variant has no time that counts, and `why_no_ratio` why there is nothing to compare it
    with; both are empty for a case that counts.
    """

    shape_id: str
    weight: float
    speed: Speed | None
    baseline: str
    baseline_speed: Speed | None
    why_no_time: str
    why_no_ratio: str


def mix_lines(name: str, mix: Sequence[WeightedCase], plan: Plan, records: Sequence[Record]) -> list[TextLine]:
    """A line for each selected variant that computes attention.  `name` is that of the workload."""
    variants = [each for each in plan.runnable if each.computes == "attention" and each.role not in NOT_ATTENTION]
    baselines = [each for each in (*plan.companions, *plan.runnable) if each.role == "baseline"]
    return [_line(name, variant, [_term(variant, each, baselines, records) for each in mix]) for variant in variants]


def _term(variant: Variant, weighted: WeightedCase, baselines: Iterable[Variant], records: Sequence[Record]) -> Term:
    case = weighted.case
    own = [each for each in records if each.variant == variant.name]
    at_case = [each for each in own if each.case is None or each.case.shape_id == case.shape_id]
    speed = next((each.speed for each in at_case if each.speed), None)
    # A variant is compared with other ones, also if it is a baseline itself.
    others = [each for each in records if each.variant != variant.name or each.role != "baseline"]
    baseline = compared_baseline(others, case.shape_id)
    baseline_speed = comparable(baseline, speed) if speed else None
    refuses_all = all(each.refuses(case) for each in baselines if each.name != variant.name)
    return Term(
        shape_id=case.shape_id,
        weight=weighted.weight,
        speed=speed,
        baseline=baseline_name(baseline, case.shape_id) if baseline else "",
        baseline_speed=baseline_speed,
        why_no_time=_why_no_time(at_case, speed, is_refused=bool(variant.refuses(case))),
        why_no_ratio=_why_no_ratio(speed, baseline_speed, refuses_all=refuses_all),
    )


def _why_no_time(at_case: Iterable[Record], speed: Speed | None, *, is_refused: bool) -> str:
    """A failure of the variant comes first: it has no time then, whatever was measured."""
    failed = next((each for each in at_case if each.outcome.defect is not None), None)
    if failed:
        return words_of(failed)
    if any(each.outcome == Outcome.INCONCLUSIVE and each.kind in JUDGED_KINDS for each in at_case):
        return "no verdict"
    if speed is None:
        return "not supported" if is_refused else "not timed"
    return "time not confirmed" if is_unconfirmed(speed) else ""


def _why_no_ratio(speed: Speed | None, baseline_speed: Speed | None, *, refuses_all: bool) -> str:
    if baseline_speed is None:
        return "not supported by any baseline" if refuses_all else "no baseline timed"
    return "" if speed and is_clear_ratio(speed, baseline_speed) else UNCLEAR


def _line(name: str, variant: Variant, terms: Sequence[Term]) -> TextLine:
    subject, own_us = f"workload {name}: {variant.name}", _sum_us(terms, lambda term: term.speed)
    if reasons := _reasons(terms):
        counted = sum(not (term.why_no_time or term.why_no_ratio) for term in terms)
        has_time = not any(term.why_no_time for term in terms)
        time = f"; weighted time {own_us[1]}" if has_time else ""
        return TextLine(f"{subject} undecided, {counted} of {len(terms)} cases have a ratio: {reasons}{time}", "yellow")
    against, (baseline_us, baseline_text) = _baselines(terms), _sum_us(terms, lambda term: term.baseline_speed)
    pairs = [(t.weight, t.speed, t.baseline_speed) for t in terms if t.speed and t.baseline_speed]
    is_on_cpu = any(speed.is_on_cpu for _, speed, _ in pairs)
    ratio = shown_ratio(own_us[0] / baseline_us, span_of_sums(pairs), is_on_cpu=is_on_cpu)
    sums = f"weighted over {len(terms)} of {len(terms)} cases: {own_us[1]} and {baseline_text}"
    if ratio == UNCLEAR:
        return TextLine(f"{subject} undecided beside {against}, the ratio of the sums is noisy ({sums})", "yellow")
    return TextLine(f"{subject} {ratio} of {against} ({sums})")


def _reasons(terms: Iterable[Term]) -> str:
    """Why cases have no ratio, each reason with its cases."""
    shapes: dict[str, list[str]] = {}
    for term in terms:
        if reason := term.why_no_time or term.why_no_ratio:
            shapes.setdefault(reason, []).append(term.shape_id)
    return "; ".join(f"{reason} at {', '.join(those)}" for reason, those in shapes.items())


def _sum_us(terms: Iterable[Term], speed_of: Callable[[Term], Speed | None]) -> tuple[float, str]:
    """The weighted sum of times, and its text, with the table's mark of a noisy time."""
    speeds = [(term.weight, speed) for term in terms if (speed := speed_of(term))]
    total_us = sum(weight * speed.device.median_us for weight, speed in speeds)
    mark = "~" if any(is_noisy(speed) for _, speed in speeds) else ""
    return total_us, f"{total_us:.2f}{mark} us"


def _baselines(terms: Iterable[Term]) -> str:
    """The baseline, or what they are if several cases have different ones."""
    names = list(dict.fromkeys(term.baseline for term in terms))
    return names[0] if len(names) == 1 else f"the fastest baseline of each case ({', '.join(names)})"
