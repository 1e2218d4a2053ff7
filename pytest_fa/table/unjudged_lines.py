"""The lines below the table that say which of their manifests' claims the variants of a run were not judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.claims import Unjudged, unjudged
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.options.options import Options
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record

CASE_KINDS = ("correct", "speed")  # whose case is one of the claims; a property has cases of its own
NOT_JUDGED = (Outcome.NOT_BUILT, Outcome.BUILD_CHANGED, Outcome.NOT_MEASURED, Outcome.UNSUPPORTED)


def unjudged_lines(records: Iterable[Record], plan: Plan, options: Options, most: int = 0) -> list[str]:
    """One line for what was not judged for one reason; variants with the same claims and reasons share it.

    A line names all claims, or one if there are more than `most` and `most` is given.  A variant of which no case was
    judged has no line: other lines give the reason.
    """
    judged: dict[str, list[Case]] = {}
    for record in records:
        if record.case is not None and record.kind in CASE_KINDS and record.outcome not in NOT_JUDGED:
            judged.setdefault(record.variant, []).append(record.case)
    names: dict[tuple[str, str], list[str]] = {}
    for variant in (each for each in plan.runnable if each.name in judged):
        for reason, texts in _by_reason(variant, judged[variant.name], plan, options).items():
            short = f"{texts[0]} and {len(texts) - 1} more" if 0 < most < len(texts) else ", ".join(texts)
            names.setdefault((short, reason), []).append(variant.name)
    return [f"{', '.join(those)}: {text}: not judged, {reason}" for (text, reason), those in names.items()]


def _by_reason(variant: Variant, judged: list[Case], plan: Plan, options: Options) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for missing in unjudged(variant, judged):
        reasons.setdefault(_reason(missing, plan, options), []).append(missing.text)
    return reasons


def _reason(missing: Unjudged, plan: Plan, options: Options) -> str:
    causes: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: missing.dtype and options.dtypes and missing.dtype not in options.dtypes, "--fa-dtype left it out"),
        (lambda: plan.cases_are_named, f"{options.cases_flag} left it out"),
        (lambda: not plan.judges_claims, f"--fa-suite={','.join(options.suites)} has no such case"),
    )
    return next((text for applies, text in causes if applies()), "its test did not run")
