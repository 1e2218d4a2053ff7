"""What a record must have before its outcome can be believed: its stages, its check, and the bounds of the policy.

Most allowed values depend on the data.  Only those of `max` and `rms` in fp16, bf16 and e4m3 under `same_precision` are
computed again, and those that are constants.  Of gradients, no allowed value is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from pytest_fa.attention import parts
from pytest_fa.attention.backward import ALL_GRADIENTS, GRADIENTS, OF_KEYS, OF_PARTS
from pytest_fa.attention.ragged import PART as RAGGED
from pytest_fa.catalog.case import Case
from pytest_fa.records.added import added_types
from pytest_fa.records.checks import Bound, Check
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record, RecordKind

PADDING = "rows past"  # the bound of rows that belong to no query or key
UNJUDGED_ROLES = ("overhead", "ablation")

# The bounds of each policy in their order, and whether they are enforced; those of further outputs follow.
BOUNDS: dict[str, dict[str, bool]] = {
    "same_precision": {"finite": True, "max": True, "rms": True, "row rms": True, "gain": True},
    "fp8": {"finite": True, "max": True, "relative rms": True, "gain": True, "max_err": False, "rel_err": False},
    "absolute": {"finite": True, "max": True},
}
# Allowed values that do not depend on data.
ALLOWED = {
    ("same_precision", "finite"): 0.0,
    ("fp8", "finite"): 0.0,
    ("fp8", "max_err"): 0.06,
    ("fp8", "rel_err"): 1e-3,
    ("absolute", "finite"): 0.0,
    ("absolute", "max"): 0.002,
}
STAGES: dict[RecordKind, tuple[str, ...]] = {  # of other kinds, the build
    "correct": ("build", "launch", "sanity", "correct"),
    "property": ("build", "launch", "correct"),
    "speed": ("build", "launch"),
    "gate": ("build", "speed"),
}
CLOSE = 1e-6  # relative difference
SHARE_OF_U, EARLIER_SHARE_OF_U = 0.75, 0.5  # that the bound `max` allows besides the error of the reference


def missing_evidence(record: Record) -> Iterator[str]:
    """Yield what a record with the outcome `ok` lacks, and what contradicts that outcome."""
    if record.outcome != Outcome.OK or record.kind == "selftest":
        return
    states: dict[str, str] = {stage.name: stage.state for stage in record.stages}
    for stage, count in Counter(each.name for each in record.stages).items():
        if count > 1:
            yield f"stage {stage} occurs {count} times"
    for name in STAGES.get(record.kind, ("build",)):
        if states.get(name) != "ok":
            yield f"the outcome is ok, stage {name} is {states.get(name, 'missing')!r}"
    yield from _missing_results(record)
    is_judged = record.kind == "correct" or (record.kind == "speed" and record.role not in UNJUDGED_ROLES)
    if is_judged and (record.check is None or states.get("correct") != "ok"):
        yield "the outcome is ok, and nothing was judged"
    if record.repeats and not (record.repeats.is_equal or record.repeats.may_differ):
        differing = record.repeats.differing + sum(record.repeats.rows_differing.values())
        yield f"the outcome is ok, {differing} of {record.repeats.count} repeats differ"
    if record.kind == "speed" and (record.speed is None) != (states.get("speed") != "ok"):
        has = "no time" if record.speed is None else "a time"
        yield f"stage speed is {states.get('speed', 'missing')!r}, and it has {has}"
    if record.speed and record.speed.agreement is None:
        yield "its time was not compared with other clocks: agreement is missing"


def _missing_results(record: Record) -> Iterator[str]:
    """Yield what a record of its kind must have besides stages and a check."""
    if any(each.kind == record.kind and each.of(record) is None for each in added_types().values()):
        yield f"the outcome of a {record.kind} is ok, and it has no result"
    if record.kind == "correct" and not (record.repeats and record.repeats.count):
        yield "the outcome is ok, and the call was not repeated"


def wrong_bounds(check: Check, case: Case | None, *, has_own_shape: bool = False) -> Iterator[str]:
    """Yield how a check differs from what its policy requires of the output of a case.

    With `has_own_shape`, the output is that of a call with another shape than the case, as in some properties.
    """
    if check.policy not in BOUNDS:
        yield f"there is no policy {check.policy!r}"
        return
    dtype = case.dtype if case is not None else ""
    is_of_case = case is not None and not has_own_shape
    if case is not None and is_of_case and check.element_count != (elements := _elements(case, check.output)):
        yield f"{check.element_count} elements were judged, {check.output or 'the output'} of {case.id} has {elements}"
    stated = [(bound.name, bound.enforced) for bound in check.bounds]
    expected = _expected_bounds(check, case if is_of_case else None)
    if stated != expected:
        yield f"policy {check.policy!r} has the bounds {_listed(expected)}, it has {_listed(stated)}"
        return
    bounds = {bound.name: bound for bound in check.bounds}
    largest = bounds[f"{check.output} max".lstrip()]
    for bound in check.bounds:
        is_users = check.against and check.policy == "absolute"  # the largest error that the user allowed
        allowed = bound.allowed if is_users else ALLOWED.get((check.policy, bound.kind), bound.allowed)
        if bound.allowed != allowed:
            yield f"bound {bound.name!r} allows {bound.allowed}, policy {check.policy!r} allows {allowed}"
    if check.policy == "same_precision" and dtype != "fp32" and not check.output:
        yield from _wrong_allowance(check, bounds["max"], bounds["rms"])
    yield from _wrong_element(check, is_largest=check.policy != "fp8" and dtype != "fp32")
    if largest.holds and check.bad_count:
        yield f"bound 'max' holds, {check.bad_count} elements are bad"
    for name, rows in check.rows.items():
        if bounds[name].holds and rows.bad_count:
            yield f"bound {name!r} holds, {rows.bad_count} rows are bad"


def _elements(case: Case, gradient: str) -> int:
    """The number of elements of the output of a case, or of one of its gradients."""
    if not gradient:
        return math.prod(case.out_shape)
    if (word := OF_PARTS.get(gradient)) is not None:
        sizes = case.batch, case.heads, case.seq_q, case.seq_k
        axes = parts.tensor_words()[word].axes(word, case)
        return 0 if axes is None else math.prod(size for size, depends in zip(sizes, axes, strict=True) if depends)
    heads, rows = (case.heads, case.seq_q) if gradient == GRADIENTS[0] else (case.kv_heads, case.seq_k)
    return case.batch * heads * rows * (case.head_dim_v if gradient == "dv" else case.head_dim)


def _expected_bounds(check: Check, case: Case | None) -> list[tuple[str, bool]]:
    """The names of the bounds of an output or of all gradients in their order, and whether they are enforced.

    Without a case, padding and gradients are those that the check has.
    """
    names = {bound.name for bound in check.bounds}
    expected: list[tuple[str, bool]] = []
    for gradient in ALL_GRADIENTS if check.output else ("",):
        prefix = f"{gradient} ".lstrip()
        has_elements = case is None or not gradient or _elements(case, gradient) > 0
        if case is None or gradient in OF_PARTS:  # which not every variant returns
            has_elements = has_elements and f"{prefix}finite" in names
        has_padding = f"{prefix}{PADDING}" in names if case is None else _has_padding(case, gradient)
        of_one = {**BOUNDS[check.policy], **({PADDING: True} if has_padding else {})} if has_elements else {}
        expected += [(f"{prefix}{name}", is_enforced) for name, is_enforced in of_one.items()]
    return [*expected, *((name, True) for name in check.rows)]


def _has_padding(case: Case, gradient: str) -> bool:
    """Whether an output or a gradient has rows that belong to no query or key."""
    claim = RAGGED.claimed_by(case)
    return gradient not in OF_PARTS and (claim == "both" or (claim == "keys" and gradient in OF_KEYS))


def _wrong_allowance(check: Check, largest: Bound, rms: Bound) -> Iterator[str]:
    """Yield it if the allowed errors do not follow from those of the reference: 2Y + 3u/4 and 1.5R + u/8.

    u, the distance between two numbers of the dtype, is a power of two.  Earlier versions allowed 2Y + u/2.
    """
    by_rms = 8 * (rms.allowed - 1.5 * check.same_precision_rms_error)
    close = CLOSE * max(largest.allowed, rms.allowed)
    for share in (SHARE_OF_U, EARLIER_SHARE_OF_U):
        by_max = (largest.allowed - 2 * check.same_precision_max_error) / share
        is_power = (
            by_max > 0 and abs(math.log2(by_max) - round(math.log2(by_max))) < CLOSE * largest.allowed / by_max + CLOSE
        )
        if is_power and abs(by_max - by_rms) <= 8 * close:
            return
    yield (
        f"bounds 'max' and 'rms' allow {largest.allowed} and {rms.allowed}; that does not follow from the errors "
        f"of the same-precision reference, {check.same_precision_max_error} and {check.same_precision_rms_error}"
    )


def _wrong_element(check: Check, *, is_largest: bool) -> Iterator[str]:
    """Yield it if the element that is shown has another error than the check says.

    With `is_largest`, all elements have one limit, so that the one that is shown has the largest error.
    """
    if check.worst_got is None or check.worst_want is None or check.max_abs_error is None:
        return
    error, largest = abs(check.worst_got - check.worst_want), check.max_abs_error
    if error > largest * (1 + CLOSE) or (is_largest and error < largest * (1 - CLOSE)):
        yield f"max_abs_error is {largest}, the element that is shown has {error}"


def _listed(bounds: list[tuple[str, bool]]) -> str:
    return ", ".join(name if is_enforced else f"{name} (not enforced)" for name, is_enforced in bounds) or "none"
