"""The kinds of tables in Markdown files.  Each kind has a spec, which the table's comment gives, and a maker."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.part import Part, shown
from pytest_fa.errors import FaError
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.features.gate.noise_table import noise_rows
from pytest_fa.features.html.margins import worst_margins
from pytest_fa.features.ncu.bottleneck import bottleneck_of
from pytest_fa.features.ncu.nsight_report import CountedKernel, NsightReport
from pytest_fa.features.selftest.exploit_lines import exploit_rows, twin_rows
from pytest_fa.options.flags import all_options
from pytest_fa.records.ceilings import read_ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed
from pytest_fa.table.answer import RunFacts, answer_lines
from pytest_fa.table.layout import table_lines
from pytest_fa.table.rows import launched_kernels, make_groups
from pytest_fa.table.tool_lines import short_name
from tools.docs.bandwidth_table import bandwidth_rows
from tools.docs.block_specs import (
    BandwidthSpec,
    BottleneckSpec,
    ClockSpec,
    ExpectationSpec,
    LadderSpec,
    MarginSpec,
    NoiseSpec,
    PhaseSpec,
    PipesSpec,
    ScreenSpec,
    ShapeSpec,
    TableSpec,
)
from tools.docs.ladder import expectation_rows, ladder_rows, phase_rows, shape_rows
from tools.docs.pipes import Loop, Pipes, read_pipes

AnySpec = TypeVar("AnySpec", bound=msgspec.Struct)


class TableProblem(FaError):
    """A table whose comment cannot be read, or whose records do not exist."""


def _spec(kind: str, words: str, of: type[AnySpec]) -> AnySpec:
    try:
        return msgspec.convert(dict(word.split("=", 1) for word in words.split()), of)
    except (ValueError, msgspec.ValidationError) as problem:
        raise TableProblem(f"fa-{kind} {words}: {problem}") from None


def _margins(spec: MarginSpec, root: Path) -> str:
    """One row for each variant and dtype: the number of checks, the largest used fractions, and the worst shape."""
    rows: list[list[str]] = []
    names: list[str] = []
    for variant in spec.variants.split(","):
        judged = [record for record in _records(spec.profiles, root, variant) if record.check and record.case]
        for dtype in sorted({record.case.dtype for record in judged if record.case}, reverse=True):
            of_dtype = [record for record in judged if record.case and record.case.dtype == dtype]
            margins = {margin.bound: margin for margin in worst_margins(of_dtype)}
            names += [name for name in margins if name not in names]
            cells = [f"{margins[name].used:.2f}" if name in margins else "-" for name in names]
            shape = max(margins.values(), key=lambda margin: margin.used).shape_id if margins else "-"
            rows.append([f"`{variant}`", dtype, str(len(of_dtype)), *cells, f"`{shape}`"])
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
        "clock offset, us",
        "confirmed",
    ]
    rows = [heads]
    for shape in spec.cases.split(","):
        for variant in spec.variants.split(","):
            timed = [record for record in _records(spec.profiles, root, variant) if record.case and record.speed]
            record = next((each for each in timed if each.case and each.case.shape_id == shape), None)
            if record is not None and record.speed is not None:
                rows.append([f"`{shape}`", f"`{variant}`", *_clock_cells(record.speed)])
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
        f"{profiler.clock_offset_us:+.2f}" if profiler else "-",
        {True: "yes", False: "NO", None: "-"}[speed.agreement.valid if speed.agreement else None],
    ]


def _noise(spec: NoiseSpec, root: Path) -> str:
    path = root / spec.profiles
    noise = read_noise(path.parent, path.name)
    if noise is None:
        raise TableProblem(f"there is no noise.json in {spec.profiles}; `python -m pytest_fa noise` makes one")
    heads = ["shape", "pair", "mean log-ratio, %", "SD of blocks, %", "SD of processes, %"]
    rows = [[*heads, "simulated gates", "with PASS or FAIL"]]
    for row in noise_rows(noise):
        figures = (f"{100 * value:.3f}" for value in (row.ratio_mean, row.block_sd, row.process_sd))
        counts = (str(row.groups), str(row.decided))
        rows.append([f"`{row.shape_id}`", f"{row.candidate} / {row.baseline}", *figures, *counts])
    return _lines(rows)


def _bottlenecks(spec: BottleneckSpec, root: Path) -> str:
    """One row for each kernel; a variant without a profile has one row that says so."""
    rows = ["| variant | kernel | bottleneck | decided by |", "| --- | --- | --- | --- |"]
    for variant in spec.variants.split(","):
        records = [each for each in read_records(root / spec.profiles / f"{variant}.jsonl") if each.kind == "profile"]
        reports = [
            report
            for each in records
            if (report := NsightReport.of(each)) and each.case and each.case.shape_id == spec.case
        ]
        report = next((each for each in reports if each.preset == "verdict"), reports[0] if reports else None)
        if report is None:
            rows.append(f"| `{variant}` | - | not measured | - |")
            continue
        rows += [f"| `{variant}` | {_bottleneck_cells(kernel)} |" for kernel in report.kernels]
    return "\n".join(rows)


def _bottleneck_cells(kernel: CountedKernel) -> str:
    name, bottleneck = short_name(kernel.name), bottleneck_of(kernel)
    if bottleneck is None:
        return f"`{name}` | a counter is missing | -"
    decided = ", ".join(f"`{counter}` {value:g}" for counter, value in bottleneck.decided_by.items())
    return f"`{name}` | {bottleneck.sentence} | {decided}"


def _ladder(spec: LadderSpec, root: Path) -> str:
    folders = root / spec.kernels, root / spec.profiles
    return _lines(ladder_rows(*folders, spec.cases.split(","), spec.against.split(",")))


def _expectations(spec: ExpectationSpec, root: Path) -> str:
    names = [name for name in spec.variants.split(",") if name]
    return _lines(expectation_rows(root / spec.kernels, root / spec.profiles, spec.cases.split(","), names))


def _shapes(spec: ShapeSpec, root: Path) -> str:
    names = spec.variants.split(",")
    if spec.against not in names:
        raise TableProblem(f"fa-shapes: against is {spec.against!r} (allowed: one of variants, {', '.join(names)})")
    if spec.kernel and spec.kernel not in names:
        raise TableProblem(f"fa-shapes: kernel is {spec.kernel!r} (allowed: one of variants, {', '.join(names)})")
    return _lines(shape_rows(root / spec.profiles, spec.cases.split(","), names, spec.against, spec.kernel))


def _phases(spec: PhaseSpec, root: Path) -> str:
    header, total, *phases = phase_rows(root / spec.kernels, root / spec.profiles, spec.of, spec.cases.split(","))
    if not phases:
        raise TableProblem(f"{spec.of} has no ablations in {spec.kernels}")
    return _lines([header, total, *phases])


def _bandwidth(spec: BandwidthSpec, root: Path) -> str:
    path = root / spec.profiles
    ceilings = read_ceilings(path.parent, path.name)
    if ceilings is None:
        raise TableProblem(f"there is no ceilings.json in {spec.profiles}; `python -m pytest_fa ceilings` makes one")
    rows = bandwidth_rows(path, ceilings, spec.cases.split(","), spec.variant, spec.against.split(","))
    if len(rows) == 1:
        raise TableProblem(f"no record of {spec.variant} at {spec.cases} in {spec.profiles}")
    return _lines(rows)


def _pipes(spec: PipesSpec, root: Path) -> str:
    path = root / spec.profiles
    pipes = read_pipes(path.parent, path.name)
    if pipes is None:
        raise TableProblem(f"there is no pipes.json in {spec.profiles}; tests/device/test_pipes.py writes one")
    heads = ["loop", "us", "TFLOP/s", "maxima per clock", "SM MHz", "W"]
    return _lines([heads, *(_pipes_row(pipes, name, loop) for name, loop in pipes.loops.items())])


def _pipes_row(pipes: Pipes, name: str, loop: Loop) -> list[str]:
    clocks = [f"{loop.clocks.sm_mhz}", f"{loop.clocks.power_watts:.0f}"] if loop.clocks else ["-", "-"]
    rates = [f"{of[name]:.0f}" if name in of else "-" for of in (pipes.tflops, pipes.per_clock)]
    return [name, f"{loop.median_us:.1f}", *rates, *clocks]


def _screen(spec: ScreenSpec, root: Path) -> str:
    if not re.fullmatch(r"[1-9][0-9]{1,3}", spec.width):
        raise TableProblem(f"fa-screen: width is {spec.width!r} (allowed: 10 to 9999)")
    saved = [record for name in spec.variants.split(",") for record in _records(spec.profiles, root, name)]
    shapes = spec.cases.split(",")
    records = [
        record for record in saved if record.case and record.case.shape_id in shapes and not NsightReport.of(record)
    ]
    path = root / spec.profiles
    lines = table_lines(make_groups(records, read_ceilings(path.parent, path.name)), int(spec.width))
    texts = [line.text for line in (*lines, *answer_lines(records, RunFacts()))]
    return "\n".join(["```console", *texts, "```"])


def _options() -> str:
    """One row for each option: its form on the command line, and its help text."""
    rows = ["| option | meaning |", "| --- | --- |"]
    for option in all_options():
        form = (f"{option.flag}={option.metavar}" if option.metavar else option.flag).replace("|", "\\|")
        meaning = option.help[0].upper() + option.help[1:]
        default = f" Default: `{option.ini_default}`." if option.ini_default else ""
        rows.append(f"| `{form}` | {meaning}.{default} |")
    return "\n".join(rows)


def _lines(rows: list[list[str]], align: str = "---:") -> str:
    rule = ["---", *[align] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:]))


def _records(profiles: str, root: Path, variant: str) -> list[Record]:
    records = read_records(root / profiles / f"{variant}.jsonl")
    if not records:
        raise TableProblem(f"no record of {variant} in {profiles}")
    return records


def _table(spec: TableSpec, root: Path) -> str:
    """The rows of one shape, in the order of `variants`."""
    against = [name for name in spec.against.split(",") if name]
    us = {name: _device_us(_shape_records(spec, root, name), name) for name in against}
    heads = [
        "variant",
        "checks passed",
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
    records = [each for each in read_records(path) if each.case is not None and each.case.shape_id == spec.case]
    if not records:
        raise TableProblem(f"no record of {variant} at {spec.case} in {spec.profiles}")
    return records


def _row(records: list[Record], variant: str, against_us: list[float]) -> list[str]:
    device_us = _device_us(records, variant)
    first = records[0]
    speed = next(each.speed for each in records if each.speed)
    judged = [each for each in records if each.check is not None or each.outcome != Outcome.OK]
    is_overhead = first.role == "overhead"
    kernels = launched_kernels([each for each in records if each.builds] or records)
    assert first.case is not None  # noqa: S101  # every record of _shape_records has a case
    return [
        f"`{variant}`",
        f"{sum(each.outcome == Outcome.OK for each in judged)}/{len(judged)}" if judged else "not checked",
        f"{device_us:.2f}",
        f"{speed.call.median_us:.2f}" if speed else "-",
        "-" if is_overhead else f"{first.case.flops_per_call / device_us / 1e6:.2f}",
        *("-" if is_overhead else f"{device_us / other_us:.3f}" for other_us in against_us),
        str(max(kernel.registers_per_thread for kernel in kernels)) if kernels else "-",
        str(sum(kernel.spill_bytes for kernel in kernels)) if kernels else "-",
    ]


def _device_us(records: list[Record], variant: str) -> float:
    for record in records:
        if record.speed is not None:
            return record.speed.device.median_us
    raise TableProblem(f"{variant} was not timed")


def _parts(words: str) -> str:
    """The parts of attention: what they write into the id of a case, or what a manifest says of them."""
    if words == "ids":
        rows = [[text, meaning] for part in parts.PARTS for text, meaning in part.rows]
        return _lines([["part", "meaning"], *rows], "---")
    if words != "claims":
        raise TableProblem(f"fa-parts {words}: allowed are ids, claims")
    heads = ["part", "`supports`", "words of `entry.call`", "`returns`"]
    named = [part for part in parts.PARTS if part.supports or part.words or part.output]
    return _lines([heads, *map(_part_cells, named)], "---")


def _part_cells(part: Part) -> list[str]:
    values = ", ".join(f"`{shown(claim)}`" for claim in part.claims)
    claims = f"`{part.supports}`: {values}" if part.supports else "-"
    words = ", ".join(f"`{word}`" for word in (*part.words, *part.output_names)) or "-"
    return [part.summary, claims, words, f"`{part.output}`" if part.output else "-"]


MAKERS: dict[str, Callable[[str, Path], str]] = {
    "table": lambda words, root: _table(_spec("table", words, TableSpec), root),
    "margins": lambda words, root: _margins(_spec("margins", words, MarginSpec), root),
    "clocks": lambda words, root: _clocks(_spec("clocks", words, ClockSpec), root),
    "noise": lambda words, root: _noise(_spec("noise", words, NoiseSpec), root),
    "bottlenecks": lambda words, root: _bottlenecks(_spec("bottlenecks", words, BottleneckSpec), root),
    "ladder": lambda words, root: _ladder(_spec("ladder", words, LadderSpec), root),
    "expectations": lambda words, root: _expectations(_spec("expectations", words, ExpectationSpec), root),
    "shapes": lambda words, root: _shapes(_spec("shapes", words, ShapeSpec), root),
    "phases": lambda words, root: _phases(_spec("phases", words, PhaseSpec), root),
    "bandwidth": lambda words, root: _bandwidth(_spec("bandwidth", words, BandwidthSpec), root),
    "pipes": lambda words, root: _pipes(_spec("pipes", words, PipesSpec), root),
    "screen": lambda words, root: _screen(_spec("screen", words, ScreenSpec), root),
    "options": lambda _words, _root: _options(),
    "parts": lambda words, _root: _parts(words),
    "exploits": lambda _words, _root: _lines(exploit_rows(), "---"),
    "twins": lambda _words, _root: _lines(twin_rows(), "---"),
}
