"""What stands in a Markdown file's tables: each kind has a spec, which its comment gives, and a maker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from pytest_fa.errors import FaError
from pytest_fa.options import OPTIONS
from pytest_fa.records.log import read_records
from pytest_fa.records.noise import read_noise
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed
from pytest_fa.records.tool_results import CountedKernel
from pytest_fa.report.ladder import expectation_rows, ladder_rows, phase_rows
from pytest_fa.report.margins import worst_margins
from pytest_fa.report.noise_table import noise_rows
from pytest_fa.report.table import launched_kernels
from pytest_fa.report.tool_lines import short_name

AnySpec = TypeVar("AnySpec", bound=msgspec.Struct)


class TableProblem(FaError):
    """A table's comment that cannot be read, or records that are not there."""


class MarginSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The used fractions of all bounds: a row for each variant and dtype, over all its records."""

    profiles: str
    variants: str


class ClockSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All times of some shapes, and whether the profiler's clock confirms them: a row for each variant and shape."""

    profiles: str
    cases: str
    variants: str


class NoiseSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far fresh processes scatter: a row for each pair of `noise.json`."""

    profiles: str


class BottleneckSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What bounds each kernel of some variants at one shape, with the counters that decided."""

    profiles: str
    case: str
    variants: str


class LadderSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every candidate of a kernels folder after its parent, and what it is held against, at some shapes."""

    profiles: str
    kernels: str
    cases: str
    against: str


class ExpectationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every candidate of a kernels folder was expected to bring, beside its times at some shapes."""

    profiles: str
    kernels: str
    cases: str


class PhaseSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each stage of a variant takes at some shapes, measured by its ablations."""

    profiles: str
    kernels: str
    of: str
    cases: str


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one table shows: one shape's records, a row for each variant, a ratio for each of `against`."""

    profiles: str
    case: str
    variants: str
    against: str = ""


def _spec(kind: str, words: str, of: type[AnySpec]) -> AnySpec:
    try:
        return msgspec.convert(dict(word.split("=", 1) for word in words.split()), of)
    except (ValueError, msgspec.ValidationError) as problem:
        raise TableProblem(f"fa-{kind} {words}: {problem}") from None


def _margins(spec: MarginSpec, root: Path) -> str:
    """A row for each variant and dtype: the checks, and the worst used fraction of each bound with its shape."""
    rows: list[list[str]] = []
    names: list[str] = []
    for variant in spec.variants.split(","):
        judged = [each for each in _records(spec.profiles, root, variant) if each.check and each.case]
        for dtype in sorted({each.case.dtype for each in judged if each.case}, reverse=True):
            mine = [each for each in judged if each.case and each.case.dtype == dtype]
            margins = {each.bound: each for each in worst_margins(mine)}
            names += [name for name in margins if name not in names]
            cells = [f"{margins[name].used:.2f}" if name in margins else "-" for name in names]
            shape = max(margins.values(), key=lambda each: each.used).shape_id if margins else "-"
            rows.append([f"`{variant}`", dtype, str(len(mine)), *cells, f"`{shape}`"])
    return _lines([["variant", "dtype", "checks", *names, "worst at"], *rows])


def _clocks(spec: ClockSpec, root: Path) -> str:
    heads = [
        "shape",
        "variant",
        "device_us",
        "+- %",
        "cold_us",
        "call_us",
        "overhead_us",
        "profiler_us",
        "between",
        "agree",
    ]
    rows = [heads]
    for shape in spec.cases.split(","):
        for variant in spec.variants.split(","):
            timed = [each for each in _records(spec.profiles, root, variant) if each.case and each.speed]
            found = next((each for each in timed if each.case and each.case.shape_id == shape), None)
            if found is not None and found.speed is not None:
                rows.append([f"`{shape}`", f"`{variant}`", *_clock_cells(found.speed)])
    return _lines(rows)


def _clock_cells(speed: Speed) -> list[str]:
    profiler, precision = speed.profiler, speed.device.precision
    return [
        f"{speed.device.median_us:.2f}",
        f"{100 * precision:.2f}" if precision is not None else "-",
        f"{speed.cold.median_us:.2f}" if speed.cold else "-",
        f"{speed.call.median_us:.2f}",
        f"{speed.launch_overhead_us:.2f}" if speed.launch_overhead_us is not None else "-",
        f"{profiler.profiler_us:.2f}" if profiler else "-",
        f"{profiler.clock_gap_us:+.2f}" if profiler else "-",
        {True: "yes", False: "NO", None: "-"}[speed.agreement.valid if speed.agreement else None],
    ]


def _noise(spec: NoiseSpec, root: Path) -> str:
    path = root / spec.profiles
    found = read_noise(path.parent, path.name)
    if found is None:
        raise TableProblem(f"no noise.json in {spec.profiles}")
    rows = [["shape", "pair", "mean of log-ratio, %", "blocks, %", "processes, %", "groups of 12", "decided at 1.0"]]
    for row in noise_rows(found):
        figures = (f"{100 * value:.3f}" for value in (row.ratio_mean, row.block_sd, row.process_sd))
        counts = (str(row.groups), str(row.decided))
        rows.append([f"`{row.shape_id}`", f"{row.candidate} / {row.baseline}", *figures, *counts])
    return _lines(rows)


def _bottlenecks(spec: BottleneckSpec, root: Path) -> str:
    """A row for each kernel; a variant without a profile says so: nothing stands in for it."""
    rows = ["| variant | kernel | verdict | decided by |", "| --- | --- | --- | --- |"]
    for variant in spec.variants.split(","):
        found = [each for each in read_records(root / spec.profiles / f"{variant}.jsonl") if each.kind == "profile"]
        profiles = [each.nsight for each in found if each.nsight and each.case and each.case.shape_id == spec.case]
        chosen = next((each for each in profiles if each.preset == "verdict"), profiles[0] if profiles else None)
        if chosen is None:
            rows.append(f"| `{variant}` | - | not measured | - |")
            continue
        rows += [f"| `{variant}` | {_bottleneck_cells(each)} |" for each in chosen.kernels]
    return "\n".join(rows)


def _bottleneck_cells(kernel: CountedKernel) -> str:
    name, bottleneck = short_name(kernel.name), kernel.bottleneck
    if bottleneck is None:
        return f"`{name}` | a counter is missing | -"
    decided = ", ".join(f"`{counter}` {value:g}" for counter, value in bottleneck.decided_by.items())
    return f"`{name}` | {bottleneck.sentence} | {decided}"


def _ladder(spec: LadderSpec, root: Path) -> str:
    places = root / spec.kernels, root / spec.profiles
    return _lines(ladder_rows(*places, spec.cases.split(","), spec.against.split(",")))


def _expectations(spec: ExpectationSpec, root: Path) -> str:
    rows = expectation_rows(root / spec.kernels, root / spec.profiles, spec.cases.split(","))
    return _lines(rows)


def _phases(spec: PhaseSpec, root: Path) -> str:
    heads, whole, *phases = phase_rows(root / spec.kernels, root / spec.profiles, spec.of, spec.cases.split(","))
    if not phases:
        raise TableProblem(f"{spec.of} has no ablations in {spec.kernels}")
    return _lines([heads, whole, *phases])


def _options() -> str:
    """Every option as the command line has it, with what `--help` says."""
    rows = ["| option | meaning |", "| --- | --- |"]
    for option in OPTIONS:
        form = (f"{option.flag}={option.metavar}" if option.metavar else option.flag).replace("|", "\\|")
        meaning = option.help[0].upper() + option.help[1:]
        default = f" Default: `{option.ini_default}`." if option.ini_default else ""
        rows.append(f"| `{form}` | {meaning}.{default} |")
    return "\n".join(rows)


def _lines(rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:]))


def _records(profiles: str, root: Path, variant: str) -> list[Record]:
    found = read_records(root / profiles / f"{variant}.jsonl")
    if not found:
        raise TableProblem(f"no record of {variant} in {profiles}")
    return found


def _table(spec: TableSpec, root: Path) -> str:
    """One shape's rows, in the order that was asked for."""
    against = [name for name in spec.against.split(",") if name]
    us = {name: _device_us(_shape_records(spec, root, name), name) for name in against}
    heads = [
        "variant",
        "right",
        "device_us",
        "call_us",
        "TFLOP/s",
        *(f"x {name}" for name in against),
        "regs",
        "spill B",
    ]
    rows = [_row(_shape_records(spec, root, name), name, list(us.values())) for name in spec.variants.split(",")]
    return _lines([heads, *rows])


def _shape_records(spec: TableSpec, root: Path, variant: str) -> list[Record]:
    path = root / spec.profiles / f"{variant}.jsonl"
    found = [each for each in read_records(path) if each.case is not None and each.case.shape_id == spec.case]
    if not found:
        raise TableProblem(f"no record of {variant} at {spec.case} in {spec.profiles}")
    return found


def _row(records: list[Record], variant: str, against_us: list[float]) -> list[str]:
    device_us = _device_us(records, variant)
    first = records[0]
    speed = next(each.speed for each in records if each.speed)
    judged = [each for each in records if each.check is not None or each.outcome != "ok"]
    is_overhead = first.role == "overhead"
    kernels = launched_kernels([each for each in records if each.builds] or records)
    assert first.case is not None  # noqa: S101  # _shape_records gives only those
    return [
        f"`{variant}`",
        f"{sum(each.outcome == 'ok' for each in judged)}/{len(judged)}" if judged else "not judged",
        f"{device_us:.2f}",
        f"{speed.call.median_us:.2f}" if speed else "-",
        "-" if is_overhead else f"{first.case.flops_per_call / device_us / 1e6:.2f}",
        *("-" if is_overhead else f"{device_us / each:.3f}" for each in against_us),
        str(max(kernel.registers_per_thread for kernel in kernels)) if kernels else "-",
        str(sum(kernel.spill_bytes for kernel in kernels)) if kernels else "-",
    ]


def _device_us(records: list[Record], variant: str) -> float:
    for record in records:
        if record.speed is not None:
            return record.speed.device.median_us
    raise TableProblem(f"{variant} was not timed")


MAKERS: dict[str, Callable[[str, Path], str]] = {
    "table": lambda words, root: _table(_spec("table", words, TableSpec), root),
    "margins": lambda words, root: _margins(_spec("margins", words, MarginSpec), root),
    "clocks": lambda words, root: _clocks(_spec("clocks", words, ClockSpec), root),
    "noise": lambda words, root: _noise(_spec("noise", words, NoiseSpec), root),
    "bottlenecks": lambda words, root: _bottlenecks(_spec("bottlenecks", words, BottleneckSpec), root),
    "ladder": lambda words, root: _ladder(_spec("ladder", words, LadderSpec), root),
    "expectations": lambda words, root: _expectations(_spec("expectations", words, ExpectationSpec), root),
    "phases": lambda words, root: _phases(_spec("phases", words, PhaseSpec), root),
    "options": lambda _words, _root: _options(),
}
