"""The table in the terminal: one row for each variant and shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from pytest_fa.records.added import added_kinds
from pytest_fa.records.agreement import is_call_too_short, is_unconfirmed
from pytest_fa.records.built import Build, Kernel
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.spread import NOISY, is_clear, is_noisy, span_of_ratio
from pytest_fa.records.timing import ON_CPU, Speed
from pytest_fa.table.baselines import baseline_title, best_baseline, comparable, for_comparison
from pytest_fa.table.timing_notes import timing_notes
from pytest_fa.table.tolerance_lines import reference_lines, tolerance_lines

NOTHING = "-"
UNCLEAR = "noisy"  # in place of a ratio
SECONDS_PER_MINUTE = 60
NOT_ATTENTION = ("overhead", "ablation")  # roles of kernels that do not compute all of attention


class Row(msgspec.Struct, frozen=True):
    """One row of the table; every cell is text.  In the row of a build, `case` is the architecture."""

    variant: str
    case: str
    checks: str
    error: str = NOTHING
    registers: str = NOTHING
    spills: str = NOTHING
    device_us: str = NOTHING
    cold_us: str = NOTHING
    call_us: str = NOTHING
    tflops: str = NOTHING
    percent_of_peak: str = NOTHING
    versus_baseline: str = NOTHING
    gb_per_s: str = NOTHING
    percent_of_copy: str = NOTHING
    smem: str = NOTHING
    build_seconds: str = NOTHING
    peak: str = NOTHING
    role: str = "candidate"

    @property
    def is_wrong(self) -> bool:
        """Whether the row has a failure, which `checks` names in capitals."""
        return self.checks.split()[0].isupper()


class RowGroup(msgspec.Struct, frozen=True):
    """The rows of one shape, or of the builds if `kind` is `builds`; the heading says what they have in common.

    `fits_l2` says that the shape is bound by bytes, and that all of them fit into L2.
    """

    kind: Literal["builds", "shape"]
    heading: str
    rows: tuple[Row, ...]
    fits_l2: bool = False


Groups = dict[tuple[str, str], list[Record]]  # by shape id and variant


Ages = Mapping[tuple[str, str], float]  # by variant and shape id: how many seconds old a time of an earlier run is


def make_groups(
    records: list[Record], ceilings: Ceilings | None = None, ages: Ages = MappingProxyType({})
) -> list[RowGroup]:
    """The variants that were only built, then one group for each shape, in the order of their first records.

    A row of `ages` was measured in an earlier run: it says when, in place of the checks of this run.

    In a group the fastest is first, candidates and baselines together; then what was not timed or is wrong; then what
    does not compute attention.  Properties that hold, and right outputs at cases of claims, have no row.  If no call
    needs memory, no row has a figure of it.
    """
    tools = added_kinds(spans_cases=False)  # shown as lines below the table instead
    by_key: Groups = {}
    for record in records:
        if record.case is not None and record.kind not in tools:
            by_key.setdefault((record.case.shape_id, record.variant), []).append(record)
    with_cases = {variant for _, variant in by_key}
    builds = [record for record in records if record.kind == "build" and record.variant not in with_cases]
    build_rows = tuple(row for record in builds for row in _build_rows(record))
    shapes: dict[str, list[list[Record]]] = {}
    for (shape, _), group in by_key.items():
        if any(record.outcome != Outcome.OK or not _has_no_row(record) for record in group):
            shapes.setdefault(shape, []).append(group)
    groups_of_shapes = (_shape_group(shape, groups, ceilings, shapes) for shape, groups in shapes.items())
    needs_memory = any(record.peak_bytes for record in records)
    return [
        *([RowGroup("builds", "", build_rows)] if build_rows else []),
        *(_with_ages(group if needs_memory else _without_memory(group), ages) for group in groups_of_shapes),
    ]


def _without_memory(group: RowGroup) -> RowGroup:
    rows = tuple(msgspec.structs.replace(row, peak=NOTHING) for row in group.rows)
    return msgspec.structs.replace(group, rows=rows)


def _with_ages(group: RowGroup, ages: Ages) -> RowGroup:
    return msgspec.structs.replace(group, rows=tuple(_with_age(row, ages) for row in group.rows))


def _with_age(row: Row, ages: Ages) -> Row:
    seconds = ages.get((row.variant, row.case))
    return row if seconds is None else msgspec.structs.replace(row, checks=age_text(seconds))


def age_text(seconds: float) -> str:
    """How long ago something was measured, such as `2 min ago`."""
    return f"{seconds:.0f} s ago" if seconds < SECONDS_PER_MINUTE else f"{seconds / SECONDS_PER_MINUTE:.0f} min ago"


def _has_no_row(record: Record) -> bool:
    """Whether a record that is ok is only counted in a line below the table."""
    return record.kind == "property" or record.is_claim


def make_rows(records: list[Record], ceilings: Ceilings | None = None) -> list[Row]:
    """The rows of all groups."""
    return [row for group in make_groups(records, ceilings) for row in group.rows]


def _shape_group(
    shape: str, groups: list[list[Record]], ceilings: Ceilings | None, shapes: dict[str, list[list[Record]]]
) -> RowGroup:
    compared = (shape, *for_comparison(groups[0][0].case))
    candidates = ([record for group in shapes.get(each, []) for record in group] for each in compared)
    baseline = next(filter(None, map(best_baseline, candidates)), None)
    speeds = [record.speed for group in groups for record in group if record.speed]
    calibration_us = min((speed.device.calibration_us for speed in speeds if speed.device.calibration_us), default=None)
    rows = tuple(_case_row(group, baseline, ceilings, calibration_us) for group in sorted(groups, key=_place))
    threads = sorted({speed.cpu_threads for speed in speeds if speed.cpu_threads})
    details = []
    if speeds and all(speed.is_on_cpu for speed in speeds):
        count = " or ".join(map(str, threads))
        details.append(f"CPU, {count} thread{'s' * (threads != [1])}" if threads else "CPU")
    if baseline:
        details.append(f"baseline: {baseline_title(baseline, shape)}")
    heading = f"{shape} ({'; '.join(details)})" if details else shape
    return RowGroup("shape", heading, rows, _fits_l2(groups, ceilings))


def _fits_l2(groups: list[list[Record]], ceilings: Ceilings | None) -> bool:
    case = groups[0][0].case
    if ceilings is None or case is None or not ceilings.is_bound_by_bytes(case):
        return False
    sizes = [record.speed.l2_bytes for group in groups for record in group if record.speed and record.speed.l2_bytes]
    return bool(sizes) and case.bytes_per_call <= min(sizes)


def _place(group: list[Record]) -> tuple[int, float]:
    """The place of a variant at a shape, for sorting."""
    speed = next((record.speed for record in group if record.speed), None)
    device_us = speed.device.median_us if speed else math.inf
    if group[0].role in NOT_ATTENTION:
        return 2, device_us
    return (0, device_us) if speed and all(record.outcome == Outcome.OK for record in group) else (1, device_us)


def property_lines(records: list[Record]) -> list[str]:
    """How many properties hold, of those that were tested; no line if there are none."""
    outcomes = [
        record.outcome for record in records if record.kind == "property" and record.outcome != Outcome.NOT_BUILT
    ]
    return [f"properties: {outcomes.count(Outcome.OK)} of {len(outcomes)} hold"] if outcomes else []


def claim_lines(records: list[Record]) -> list[str]:
    """How many outputs are right at cases that were added for what manifests claim; no line if there are none."""
    outcomes = [record.outcome for record in records if record.is_claim and record.outcome != Outcome.NOT_BUILT]
    others = "other lengths, dtypes, head_dims, masks, layouts and groupings are correct"
    return [f"claims: {outcomes.count(Outcome.OK)} of {len(outcomes)} {others}"] if outcomes else []


def headline(record: Record) -> str:
    """One record in a few words, for the properties in a JUnit file."""
    parts: list[str] = [record.outcome]
    if record.check is not None:
        parts.append(f"error {_error([record])} {record.check.against}".rstrip())
    if record.speed is not None:
        parts.append(f"device_us {record.speed.device.median_us:.2f}, call_us {record.speed.call.median_us:.2f}")
    return ", ".join(parts)


def notes(records: list[Record]) -> list[str]:
    """The lines below the table: missing protection, advisories, incomplete checks, notes on times, equal code."""
    builds = {(build.variant, build.arch): build for record in records for build in record.builds}
    lines = [
        f"ptxas: {build.variant}/{build.arch}: {advisory.code} {advisory.text}"
        for build in builds.values()
        for advisory in build.advisories
    ]
    reasons = dict.fromkeys(record.unprotected for record in records if record.unprotected)
    unprotected = [
        f"unprotected: judge and variants shared a process, so these results are the variants' word, and no time is "
        f"gated: {reason}"
        for reason in reasons
    ]
    by_code: dict[tuple[str, str], list[str]] = {}
    for build in builds.values():
        if build.code_identity is not None:
            by_code.setdefault((build.arch, build.code_identity), []).append(build.variant)
    same = [(arch, names) for (arch, _), names in by_code.items() if len(names) > 1]
    lines += [f"judged without NaN-filled shared memory: {reason}" for reason in _reasons_for_no_smem_poison(records)]
    lines += timing_notes(records)
    lines += [*tolerance_lines(records), *reference_lines(records)]
    return [*unprotected, *lines, *(f"same machine code for {arch}: {', '.join(names)}" for arch, names in same)]


def _reasons_for_no_smem_poison(records: list[Record]) -> list[str]:
    reasons = (record.repeats.why_no_smem_poison for record in records if record.repeats)
    return [reason for reason in dict.fromkeys(reasons) if reason not in (None, ON_CPU)]


def ratio_text(speed: Speed, baseline: Speed) -> str:
    """`device_us` divided by that of a baseline."""
    if speed is baseline:
        return f"{1:.3f}"
    ratio, span = speed.device.median_us / baseline.device.median_us, span_of_ratio(speed, baseline)
    return shown_ratio(ratio, span, is_on_cpu=speed.is_on_cpu)


def shown_ratio(ratio: float, span: float, *, is_on_cpu: bool) -> str:
    """A ratio of times whose possible values have this span: `~` before one that is known only roughly, or `noisy`.

    More than two digits would mean nothing if the span is more than 25 %.
    """
    if not is_clear(ratio, span):
        return UNCLEAR
    if is_on_cpu:
        return f"~{ratio:.1f}" if span > NOISY else f"{ratio:.2f}"
    return f"{ratio:.3f}"


def _case_row(
    records: list[Record], baseline: Record | None, ceilings: Ceilings | None, least_calibration_us: float | None
) -> Row:
    first = records[0]
    assert first.case is not None  # noqa: S101  # make_groups groups only records with a case
    speed = next((record.speed for record in records if record.speed), None)
    kernels = launched_kernels(records)
    device_us = speed.device.median_us if speed else None
    computes = first.role != "overhead"
    least_us = ceilings.least_us(first.case) if ceilings and computes else None
    baseline_speed = comparable(baseline, speed) if speed and computes else None
    copy_us = ceilings.copy_us(first.case) if ceilings and computes and ceilings.is_bound_by_bytes(first.case) else None
    return Row(
        variant=first.variant,
        case=first.case.shape_id,
        checks=_checks(records),
        error=_error(records),
        registers=_number(max((kernel.registers_per_thread for kernel in kernels), default=None), "d"),
        spills=_number(sum(kernel.spill_bytes for kernel in kernels) if kernels else None, "d"),
        device_us=_number(device_us, ".2f") + (_mark(speed, least_calibration_us) if speed else ""),
        cold_us=_number(speed.cold.median_us if speed and speed.cold else None, ".2f"),
        call_us=_number(speed.call.median_us if speed else None, ".2f") + _call_mark(speed),
        tflops=_number(first.case.flops_per_call / device_us / 1e6 if device_us and computes else None, ".2f"),
        percent_of_peak=_number(100 * least_us / device_us if device_us and least_us and not copy_us else None, ".1f"),
        gb_per_s=_number(first.case.bytes_per_call / device_us / 1e3 if device_us and copy_us else None, ".0f"),
        percent_of_copy=_number(100 * copy_us / device_us if device_us and copy_us else None, ".1f"),
        versus_baseline=_ratio(speed, baseline_speed),
        peak=_kibibytes([record.peak_bytes for record in records if record.peak_bytes is not None]),
        role=first.role,
    )


def _ratio(speed: Speed | None, baseline: Speed | None) -> str:
    """The ratio to the baseline; none for a time that is not confirmed."""
    return ratio_text(speed, baseline) if speed and baseline and not is_unconfirmed(speed) else NOTHING


def _call_mark(speed: Speed | None) -> str:
    """`!` behind the time of a call from Python that is less than its period on the GPU, and so cannot be right."""
    return "!" if speed and not speed.is_on_cpu and is_call_too_short(speed) else ""


def _mark(speed: Speed, least_calibration_us: float | None) -> str:
    """`!` behind a time that is not confirmed, `~` behind one that is noisy."""
    return "!" if is_unconfirmed(speed) else "~" if is_noisy(speed, least_calibration_us) else ""


def _build_rows(record: Record) -> list[Row]:
    """One row for each architecture of a variant that was only built.

    If a build failed, the record has the builds of the other architectures; the failure has a row of its own.
    """
    is_missing = record.outcome == Outcome.NOT_BUILT
    result = "built" if record.outcome == Outcome.OK or is_missing else _upper_case_outcome(record)
    rows = [Row(record.variant, build.arch, result, **_build_cells(build)) for build in record.builds]
    failed = [Row(record.variant, NOTHING, _upper_case_outcome(record))] if is_missing or not rows else []
    return [*failed, *rows]


def _build_cells(build: Build) -> dict[str, str]:
    """The figures of a build: the most registers and shared memory of its kernels, and the spills of all of them."""
    kernels = build.kernels
    return {
        "registers": _number(max((kernel.registers_per_thread for kernel in kernels), default=None), "d"),
        "spills": _number(sum(kernel.spill_bytes for kernel in kernels) if kernels else None, "d"),
        "smem": _number(max((kernel.smem_bytes_per_block for kernel in kernels), default=None), "d"),
        "build_seconds": build.seconds_text,
    }


def launched_kernels(records: list[Record]) -> list[Kernel]:
    """The kernels of the build that were launched; all of them if the launches are not known."""
    kernels = [kernel for build in records[0].builds for kernel in build.kernels]
    names = {launch.mangled for record in records if record.speed for launch in record.speed.launches}
    return [kernel for kernel in kernels if kernel.mangled in names] or kernels


def _checks(records: list[Record]) -> str:
    """The number of judgements, or of failed ones.  What spans cases judges them once more: no count.

    What was not built was not judged, so it has no count.
    """
    counted = [each for each in records if each.kind not in added_kinds(spans_cases=True)] or records
    judged = [
        each for each in counted if each.check is not None or each.kind == "property" or each.outcome != Outcome.OK
    ]
    failed = [record for record in judged if record.outcome != Outcome.OK]
    if not judged:
        return "not checked"
    if failed and failed[0].outcome == Outcome.NOT_BUILT:
        return _upper_case_outcome(failed[0])
    if failed:
        return f"{_upper_case_outcome(failed[0])} {len(failed)}/{len(judged)}"
    return f"ok {len(judged)}/{len(judged)}"


def _upper_case_outcome(record: Record) -> str:
    return record.outcome.upper().replace("_", " ")


def _error(records: list[Record]) -> str:
    """The bound of all checks that is closest to its limit or farthest beyond it, with its value."""
    bounds = [record.check.tightest for record in records if record.check is not None]
    if not bounds:
        return NOTHING
    worst = max(bounds, key=lambda bound: (not bound.holds, bound.value is None, bound.used or 0.0))
    value = "not finite" if worst.value is None else f"{worst.value:.1e}"
    return f"{worst.name} {value} / {worst.allowed:.1e}"


def _kibibytes(sizes: list[int]) -> str:
    """The largest of some sizes in bytes as KiB, rounded up, so that no memory is shown as 0."""
    return _number(math.ceil(max(sizes) / 1024), "d") if sizes else NOTHING


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"
