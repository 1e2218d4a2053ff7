"""`fa-findings`: what the records of each variant say about its errors, its clocks or its bottleneck."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from pytest_fa.features.html.margins import worst_margins
from pytest_fa.features.ncu.bottleneck import bottleneck_of
from pytest_fa.features.ncu.nsight_report import DURATION, CountedKernel, NsightReport
from pytest_fa.records.record import JUDGED_KINDS, Record
from pytest_fa.records.timing import ProfilerTime, Speed
from pytest_fa.table.tool_lines import short_name
from tools.docs.block import (
    NOTHING,
    Shown,
    figure,
    names_in,
    one_of,
    read_words,
    records_of,
    some_names_in,
    standing_of,
    table,
    with_origin,
)

MAX_TERMS = 3  # kernels and memsets of a call whose durations are listed


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of the comment; lists have commas.  `margins` are over all cases, the others need `cases`."""

    of: str
    profiles: str
    variants: str
    cases: str = ""


def block(words: str, root: Path) -> str:
    """The table that the words of a comment describe.  Raises `TableProblem` for words or records that do not exist."""
    spec = read_words(words, Spec)
    return one_of(spec.of, FINDINGS, "of")(spec, root)


def contents(words: str, root: Path) -> Shown:
    """What the table shows that was measured.  Raises `TableProblem` for words or records that do not exist."""
    spec = read_words(words, Spec)
    names = tuple(some_names_in(spec.variants, "variants"))
    if one_of(spec.of, FINDINGS, "of") is _margins:
        judged = [each for name in names for each in records_of(root, spec.profiles, name) if each.check and each.case]
        shapes = tuple(dict.fromkeys(each.case.shape_id for each in judged if each.case))
        return Shown(spec.profiles, names, shapes, (), JUDGED_KINDS)
    shapes = tuple(some_names_in(spec.cases, "cases"))
    if FINDINGS[spec.of] is _bottlenecks:
        return Shown(spec.profiles, names, shapes, ("profile",))
    return Shown(spec.profiles, names, shapes, ("speed",), ("profile",))


def _margins(spec: Spec, root: Path) -> str:
    """One row for each variant and dtype: the number of checks, the largest used fractions, and the worst shape."""
    rows: list[list[str]] = []
    shown: list[Record] = []
    names: list[str] = []
    for variant in names_in(spec.variants):
        judged = [record for record in records_of(root, spec.profiles, variant) if record.check and record.case]
        shown += judged
        for dtype in sorted({record.case.dtype for record in judged if record.case}, reverse=True):
            of_dtype = [record for record in judged if record.case and record.case.dtype == dtype]
            margins = {margin.bound: margin for margin in worst_margins(of_dtype)}
            names += [name for name in margins if name not in names]
            cells = [f"{margins[name].used:.2f}" if name in margins else NOTHING for name in names]
            shape = max(margins.values(), key=lambda margin: margin.used).shape_id if margins else NOTHING
            rows.append([f"`{variant}`", dtype, str(len(of_dtype)), *cells, f"`{shape}`"])
    return with_origin(
        table([["variant", "dtype", "checks", *names, "worst at"], *rows]), shown, has_checks=True, has_times=False
    )


CLOCK_HEADS = ("profiler, us", "device_us", "clock offset, us", "Nsight Compute, us")


def _clocks(spec: Spec, root: Path) -> str:
    """The time of a call by each clock, and what it launches: one row for each shape and variant."""
    rows = [["shape", "variant", *CLOCK_HEADS]]
    saved = {variant: records_of(root, spec.profiles, variant) for variant in names_in(spec.variants)}
    shown: list[Record] = []
    for shape in some_names_in(spec.cases, "cases"):
        for variant, records in saved.items():
            of_shape = [record for record in records if record.case and record.case.shape_id == shape]
            timed = next((record for record in of_shape if record.speed), None)
            if timed and timed.speed:
                cells = _clock_cells(timed.speed)
                rows.append([f"`{shape}`", f"`{variant}`", *cells, _kernels_by_ncu(of_shape)])
                shown.append(timed)
    return with_origin(table(rows), shown)


def _clock_cells(speed: Speed) -> list[str]:
    profiler = speed.profiler
    return [
        _sum_of_nodes(profiler) if profiler else NOTHING,
        figure(speed.device.median_us),
        f"{profiler.clock_offset_us:+.2f}" if profiler else NOTHING,
    ]


def _sum_of_nodes(profiler: ProfilerTime) -> str:
    """What one call launches with its durations, such as `memset 0.84 + kernel 7.11 = 7.96`; many nodes as a number."""
    count = sum(node.count for node in profiler.nodes)
    total = figure(profiler.profiler_us)
    if count > MAX_TERMS:
        return f"{count} nodes: {total}"
    kinds = {node.name: node.name.split()[0].lower() for node in profiler.nodes}
    words = {name: kind if kind in ("memset", "memcpy") else "kernel" for name, kind in kinds.items()}
    terms = [f"{words[node.name]} {figure(node.mean_us)}" for node in profiler.nodes for _ in range(node.count)]
    return " + ".join(terms) + (f" = {total}" if count > 1 else "")


def _kernels_by_ncu(records: list[Record]) -> str:
    """The duration of each kernel by Nsight Compute, with the day; `-` if it was not profiled."""
    for record in records:
        for report in NsightReport.all_of([record]):
            durations_us = [kernel.counters.get(DURATION, 0.0) / 1000 for kernel in report.kernels]
            return f"{' + '.join(map(figure, durations_us))} ({record.measured_at[:10]})"
    return NOTHING


def _bottlenecks(spec: Spec, root: Path) -> str:
    """What bounds each kernel; a variant without a profile has one row that says so."""
    rows, shapes = [["variant", "kernel", "bottleneck", "decided by"]], some_names_in(spec.cases, "cases")
    shown: list[Record] = []
    for variant in names_in(spec.variants):
        saved = standing_of(root / spec.profiles, variant)
        records = [each for each in saved if each.case and each.case.shape_id in shapes]
        reports = NsightReport.all_of(records)
        shown += [each for each in records if NsightReport.of(each)]
        report = next((each for each in reports if each.preset == "verdict"), reports[0] if reports else None)
        kernels = [_bottleneck_cells(kernel) for kernel in report.kernels] if report else []
        rows += [[f"`{variant}`", *cells] for cells in (kernels if report else [[NOTHING, "not measured", NOTHING]])]
    return with_origin(table(rows, "---"), shown)


def _bottleneck_cells(kernel: CountedKernel) -> list[str]:
    name, bottleneck = short_name(kernel.name), bottleneck_of(kernel)
    if bottleneck is None:
        return [f"`{name}`", "a counter is missing", NOTHING]
    decided = ", ".join(f"`{counter}` {value:g}" for counter, value in bottleneck.decided_by.items())
    return [f"`{name}`", bottleneck.sentence, decided]


FINDINGS: dict[str, Callable[[Spec, Path], str]] = {
    "margins": _margins,
    "clocks": _clocks,
    "bottlenecks": _bottlenecks,
}
