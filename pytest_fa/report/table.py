"""The table in the terminal: one row for each variant and shape."""

from __future__ import annotations

import io
from typing import Any

import msgspec

from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.records.built import Kernel
from pytest_fa.records.ceilings import Ceilings
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU
from pytest_fa.report.timing_notes import is_unconfirmed, timing_notes

NOTHING = "-"
TOOL_KINDS = ("profile", "sanitize")  # shown as lines below the table instead


class Row(msgspec.Struct, frozen=True):
    """One row of the table; every cell is text."""

    variant: str
    case: str
    checks: str
    error: str
    registers: str
    spills: str
    device_us: str
    cold_us: str
    call_us: str
    tflops: str
    percent_of_peak: str
    versus_baseline: str


HEADERS = (
    "variant",
    "case",
    "checks",
    "error / allowed",
    "regs",
    "spill B",
    "device_us",
    "cold_us",
    "call_us",
    "TFLOP/s",
    "% peak",
    "x baseline",
)
FOOTNOTE = (
    "checks: number of checked runs that passed (ok), or the first failure and how many runs failed.\n"
    "error / allowed: error and limit of the tolerance policy's bound that is closest to its limit.\n"
    "device_us: median time per call, back to back on the device (CPU: wall clock of a call).  !: time not confirmed.\n"
    "cold_us: time of one call after L2 was evicted.  call_us: time that a Python caller waits per call.\n"
    "% peak: TFLOP/s in percent of the matrix product rate measured on this GPU (python -m pytest_fa ceilings).\n"
    "x baseline: device_us divided by that of the fastest correct baseline (SDPA backends); below 1 is faster."
)


def make_rows(records: list[Record], ceilings: Ceilings | None = None) -> list[Row]:
    """The rows: shapes in the order of their first record; at each shape first the candidates, then the companions."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.case is not None and record.kind not in TOOL_KINDS:
            groups.setdefault((record.case.shape_id, record.variant), []).append(record)
    shapes = list(dict.fromkeys(shape for shape, _ in groups))
    with_cases = {variant for _, variant in groups}
    builds = [record for record in records if record.kind == "build" and record.variant not in with_cases]
    return [
        *(row for record in builds for row in _build_rows(record)),
        *(_case_row(groups[key], groups, ceilings) for shape in shapes for key in _of_shape(groups, shape)),
    ]


def _of_shape(groups: dict[tuple[str, str], list[Record]], shape: str) -> list[tuple[str, str]]:
    keys = [key for key in groups if key[0] == shape]
    return sorted(keys, key=lambda key: groups[key][0].role in COMPANION_ROLES)


def render(rows: list[Row], width: int, *, color: bool) -> str:
    """The table as text, without cut cells; rows of failures are red if `color`."""
    from rich import box  # noqa: PLC0415  # imported only in runs with records
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, header in enumerate(HEADERS):
        justify: Any = "left" if index < 4 else "right"  # noqa: PLR2004  # the first four columns are words
        table.add_column(header, justify=justify, no_wrap=True)
    for row in rows:
        style = "red" if row.checks.split()[0].isupper() else None
        table.add_row(*map(escape, msgspec.structs.astuple(row)), style=style)
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=color, color_system="standard" if color else None)
    console.width = max(width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)
    return text.getvalue().strip("\n")


def render_matrix(records: list[Record], width: int) -> str:
    """The kernels of the self-test, each with the checks that rejected it."""
    rows = [(record.variant, ", ".join(record.caught_by) or "no check", record.outcome) for record in records]
    name = max(len(row[0]) for row in rows)
    lines = [f"{variant:{name}}  {'' if outcome == 'ok' else 'WRONG: '}{checks}" for variant, checks, outcome in rows]
    wrong = sum(outcome != "ok" for _, _, outcome in rows)
    lines.append(f"{len(rows)} kernels, {wrong} of them with an unexpected result (marked WRONG)")
    return "\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in lines)


def headline(record: Record) -> str:
    """One record in a few words, for the properties in a JUnit file."""
    parts: list[str] = [record.outcome]
    if record.check is not None:
        parts.append(f"error {_error([record])}")
    if record.speed is not None:
        parts.append(f"device_us {record.speed.device.median_us:.2f}, call_us {record.speed.call.median_us:.2f}")
    return ", ".join(parts)


def notes(records: list[Record]) -> list[str]:
    """The lines below the table: ptxas advisories, incomplete checks, notes on times, variants with equal code."""
    builds = {(build.variant, build.arch): build for record in records for build in record.builds}
    lines = [
        f"ptxas: {build.variant}/{build.arch}: {advisory.code} {advisory.text}"
        for build in builds.values()
        for advisory in build.advisories
    ]
    by_code: dict[tuple[str, str], list[str]] = {}
    for build in builds.values():
        if build.code_identity is not None:
            by_code.setdefault((build.arch, build.code_identity), []).append(build.variant)
    same = [(arch, names) for (arch, _), names in by_code.items() if len(names) > 1]
    lines += [f"judged without NaN-filled shared memory: {reason}" for reason in _reasons_for_no_smem_poison(records)]
    lines += timing_notes(records)
    return [*lines, *(f"same machine code for {arch}: {', '.join(names)}" for arch, names in same)]


def _reasons_for_no_smem_poison(records: list[Record]) -> list[str]:
    reasons = (record.repeats.why_no_smem_poison for record in records if record.repeats)
    return [reason for reason in dict.fromkeys(reasons) if reason not in (None, ON_CPU)]


def best_baseline_us(records: list[Record]) -> tuple[str, float] | None:
    """The name and the `device_us` of the fastest baseline without a failure, among the records of one shape."""
    failed = {record.variant for record in records if record.outcome != "ok"}
    baselines = [each for each in records if each.role == "baseline" and each.variant not in failed]
    times = [(each.speed.device.median_us, each.variant) for each in baselines if each.speed]
    return (min(times)[1], min(times)[0]) if times else None


def _case_row(records: list[Record], groups: dict[tuple[str, str], list[Record]], ceilings: Ceilings | None) -> Row:
    first = records[0]
    assert first.case is not None  # noqa: S101  # make_rows groups only records with a case
    shape = first.case.shape_id
    speed = next((record.speed for record in records if record.speed), None)
    best = best_baseline_us([record for key, group in groups.items() if key[0] == shape for record in group])
    kernels = launched_kernels(records)
    device_us = speed.device.median_us if speed else None
    least_us = ceilings.least_us(first.case) if ceilings and first.role != "overhead" else None
    return Row(
        variant=first.variant,
        case=shape,
        checks=_checks(records),
        error=_error(records),
        registers=_number(max((kernel.registers_per_thread for kernel in kernels), default=None), "d"),
        spills=_number(sum(kernel.spill_bytes for kernel in kernels) if kernels else None, "d"),
        device_us=_number(device_us, ".2f") + ("!" if speed and is_unconfirmed(speed) else ""),
        cold_us=_number(speed.cold.median_us if speed and speed.cold else None, ".2f"),
        call_us=_number(speed.call.median_us if speed else None, ".2f"),
        tflops=_number(
            first.case.flops_per_call / device_us / 1e6 if device_us and first.role != "overhead" else None, ".2f"
        ),
        percent_of_peak=_number(100 * least_us / device_us if device_us and least_us else None, ".1f"),
        versus_baseline=_number(
            device_us / best[1] if device_us and best and first.role != "overhead" else None, ".3f"
        ),
    )


def _build_rows(record: Record) -> list[Row]:
    """One row for each architecture of a variant that was only built."""
    result = "built" if record.outcome == "ok" else _upper_case_outcome(record)
    rows = []
    for build in record.builds:
        registers = max((kernel.registers_per_thread for kernel in build.kernels), default=None)
        spills = sum(kernel.spill_bytes for kernel in build.kernels)
        cells = (_number(registers, "d"), _number(spills, "d"))
        rows.append(Row(record.variant, build.arch, result, NOTHING, *cells, *[NOTHING] * 6))
    return rows or [Row(record.variant, NOTHING, result, *[NOTHING] * 9)]


def launched_kernels(records: list[Record]) -> list[Kernel]:
    """The kernels of the build that were launched; all of them if the launches are not known."""
    kernels = [kernel for build in records[0].builds for kernel in build.kernels]
    names = {launch.mangled for record in records if record.speed for launch in record.speed.launches}
    return [kernel for kernel in kernels if kernel.mangled in names] or kernels


def _checks(records: list[Record]) -> str:
    judged = [each for each in records if each.check is not None or each.kind == "property" or each.outcome != "ok"]
    failed = [record for record in judged if record.outcome != "ok"]
    if not judged:
        return "not checked"
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


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"
