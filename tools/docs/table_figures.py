"""Finds the figures of generated tables that no saved record has, of the card, the days and the commits stated below.

It reads a table as the page has it, and the records, and uses nothing of what makes the table.  A figure is found if a
record of the variant and the shape of its cell has it; a ratio or a difference, if two such records have it.  Counts of
lines and of checks, and what a manifest says, are not figures of a record.  Of `noise.json` and `unseen.json`, whose
tables have means over many times, only the card, the day and the commit are compared; of published speeds, the measured
times.  `fa-accuracy` is left out, since it has no figure of a single result.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kernels.auto.rung_times import UNSEEN, read_rung_times
from pytest_fa.features.gate.decision import control_of
from pytest_fa.features.gate.gated import Gate, GatePair
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.features.ncu.nsight_report import DURATION, NsightReport
from pytest_fa.records.built import Kernel
from pytest_fa.records.ceilings import Ceilings, read_ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Environment, Record, Source
from pytest_fa.records.standing import day_of, words_of
from pytest_fa.records.timing import Clocks
from tools.docs.block import names_in
from tools.docs.markdown import BLOCK
from tools.docs.measured_figures import COMMIT, DAY
from tools.docs.pipes import read_pipes

UNMEASURED = {"changed lines", "lines", "expected, by the manifest", "checks passed", "checks", "omitted phase"}
UNMEASURED |= {"variant", "measured by", "kernel", "bottleneck"}
FIGURE = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?")
FAILURE = re.compile(r"([a-z ]+) \((20\d\d-\d\d-\d\d)\)")
DATED = re.compile(rf" \({DAY.pattern}\)")  # what has its own day
COMPARED = re.compile(r"^(\S+): .*?(\d+\.\d+) x the time of (\S+) at (\S+)$")
ReadRecords = Callable[[Path], list[Record]]
NO_DAY = "the file does not say when"


class StatedOrigin(NamedTuple):
    """What the line below a table states: with more commits than two, it names the first and the last."""

    text: str

    def fits(self, environment: Environment, day: str, source: Source | None) -> bool:
        """Whether a result with this card, day and commit is one of those that the line is about."""
        days, commit = DAY.findall(self.text.partition(";")[0]), source.commit if source else None
        is_of_card = bool(environment.gpu) and f"Measured on an {environment.gpu}," in self.text
        is_of_days = min(days) <= day <= max(days) if days else NO_DAY in self.text and not day
        if commit is None:
            return is_of_card and is_of_days and "without a commit" in self.text
        named = any(commit.startswith(each) for each in COMMIT.findall(self.text))
        return is_of_card and is_of_days and (named or re.search(r"\(\d+ commits\)", self.text) is not None)


class RenderedTable(NamedTuple):
    """A table as the page has it: its line, its kind, the words of its comment, and the lines below that."""

    line: int
    kind: str
    words: dict[str, str]
    folder: Path
    body: list[str]

    @property
    def rows(self) -> list[list[str]]:
        """The cells of each row without backticks; the first row has the heads."""
        lines = [line for line in self.body if line.startswith("|") and not line.startswith("| ---")]
        return [[cell.strip() for cell in line.replace("`", "").strip("|").split("|")] for line in lines]

    @property
    def origin(self) -> StatedOrigin:
        """The line below the table; an empty text without one."""
        return StatedOrigin(next((line for line in reversed(self.body) if line.startswith("Measured on")), ""))


class RecordsOfTable:
    """The records that the figures of a table may come from: those with the origin that it states."""

    def __init__(self, table: RenderedTable, read: ReadRecords) -> None:
        self._folder, self._origin, self._read = table.folder, table.origin, read
        self._ceilings = read_ceilings(table.folder.parent, table.folder.name)

    def saved(self, variant: str, shape: str) -> list[Record]:
        """The records of a variant at a shape, of any origin."""
        saved = self._read(self._folder / f"{variant}.jsonl")
        return [record for record in saved if record.case and record.case.shape_id == shape]

    def at(self, variant: str, shape: str) -> list[Record]:
        """The records of a variant at a shape with the origin that the table states."""
        saved, fits = self.saved(variant, shape), self._origin.fits
        return [each for each in saved if fits(each.environment, day_of(each), each.source)]

    def values(self, head: str, variant: str, shape: str) -> list[float]:
        """What the records of a variant at a shape have for the column with this head."""
        return [value for record in self.at(variant, shape) for value in _values_of(record, head, self._ceilings)]

    def pairs(self, variant: str, baseline: str, shape: str) -> list[GatePair]:
        """The pairs of a baseline and a shape in the gates of a variant with the origin that the table states."""
        saved, fits = self._read(self._folder / f"{variant}.jsonl"), self._origin.fits
        gates = Gate.all_of(record for record in saved if fits(record.environment, day_of(record), record.source))
        pairs = [pair for gate in gates for pair in gate.pairs]
        return [pair for pair in pairs if (pair.samples.baseline, pair.samples.shape_id) == (baseline, shape)]

    def ratios(self, variant: str, others: Iterable[str], shape: str) -> list[float]:
        """The times of a variant, divided by those of each other one."""
        others_us = [us for other in others for us in self.values("device_us", other, shape)]
        return [one / other for one in self.values("device_us", variant, shape) for other in others_us]


def problems_of(text: str, root: Path, read: ReadRecords = read_records) -> list[str]:
    """The figures of the tables of a page that no record has, each as `line: row, head: figure`."""
    return [f"{table.line}: {problem}" for table in tables_of(text, root) for problem in _problems_of(table, read)]


def tables_of(text: str, root: Path) -> Iterator[RenderedTable]:
    """The tables of a page that show something measured."""
    for block in BLOCK.finditer(text):
        words: dict[str, str] = dict(word.partition("=")[::2] for word in block["words"].split())
        folder = root / words.get("profiles", block["words"])
        if block["kind"] not in ("list", "accuracy"):
            line = text.count("\n", 0, block.start()) + 1
            yield RenderedTable(line, block["kind"], words, folder, block[0].splitlines()[1:-1])


def _problems_of(table: RenderedTable, read: ReadRecords) -> Iterator[str]:
    if table.kind in ("file", "regret"):
        yield from _problems_of_file(table)
        return
    records = RecordsOfTable(table, read)
    count = 0
    for row, head, text, values in _cells(table, records):
        count += 1
        figures = FIGURE.findall(DATED.sub("", text))
        yield from (f"{row}, {head}: {each}" for each in figures if not any(_shows(each, value) for value in values))
        if failure := FAILURE.search(text):
            variant, shape = row.split(" at ")
            if not any(failure.groups() == (words_of(each), day_of(each)) for each in records.at(variant, shape)):
                yield f"{row}, {head}: {failure[0]}"
    if not count:
        yield "no cell of the table can be read"


TableCell = tuple[str, str, str, list[float]]  # of a row `variant at shape`: its name, the head, the text, the values


def _cells(table: RenderedTable, records: RecordsOfTable) -> Iterator[TableCell]:
    if table.kind == "screen":
        yield from _cells_of_screen(table, records)
        return
    if table.kind == "claims":
        yield from _cells_of_claims(table, records)
        return
    if table.kind == "gates":
        yield from _cells_of_gates(table, records)
        return
    shapes = names_in(table.words["cases"])
    heads, *rows = table.rows
    for row in rows:
        for head, text in zip(heads[1:], row[1:], strict=True):
            if head in UNMEASURED or head.startswith("kernel of") or text in ("-", "not measured"):
                continue
            if table.kind == "variants":
                variant, shape = row[heads.index("measured by") if "measured by" in heads else 0], shapes[0]
                values = _values_by_variant(table, records, head, variant, shapes)
                shape = next((each for each in shapes if head.endswith(each)), shape)
            elif table.kind == "shapes":
                shape, names = row[0], names_in(table.words["variants"])
                variant = next((name for name in names if head.split()[0] == name), names[0])
                values = _values_by_shape(records, head, names, shape)
            else:
                shape, variant = (row[0], row[1]) if heads[0] == "shape" else (shapes[0], row[0])
                values = _values_by_profiler(records.saved(variant, shape), head, text)
                values += records.values(head, variant, shape)
            yield f"{variant} at {shape}", head, text.removesuffix("!").removesuffix(" us"), values


def _cells_of_claims(table: RenderedTable, records: RecordsOfTable) -> Iterator[TableCell]:
    """The measured times beside published speeds: of the kernel and, beside a ratio, of the other one."""
    heads, *rows = table.rows
    for row in rows:
        variant, shape, claimed, measured = row[:4]
        names = [variant, *(claimed.split(" x ")[1:])]
        yield (
            f"{variant} at {shape}",
            heads[3],
            measured,
            [us for name in names for us in records.values("us", name, shape)],
        )


def _cells_of_gates(table: RenderedTable, records: RecordsOfTable) -> Iterator[TableCell]:
    """The ratio of a pair, its interval, the interval of its A/A control, and the time of the baseline."""
    variant, baseline = table.words["variant"], table.words["baseline"]
    heads, *rows = table.rows
    for row in rows:
        pairs = records.pairs(variant, baseline, row[0])
        controls = [control_of(pair.samples)[0] for pair in pairs]
        of_columns: list[list[float | None]] = [
            [pair.ratio for pair in pairs],
            [value for pair in pairs for value in (pair.low, pair.high)],
            [100 * math.expm1(limit) for control in controls for limit in (control.mean, control.low, control.high)],
            [pair.baseline_us for pair in pairs],
        ]
        for head, text, values in zip(heads[1:], row[1:], of_columns, strict=True):
            yield f"{variant} at {row[0]}", head, text, [value for value in values if value is not None]


def _values_by_variant(
    table: RenderedTable, records: RecordsOfTable, head: str, variant: str, shapes: list[str]
) -> list[float]:
    if head.startswith("x "):
        return records.ratios(variant, [head.removeprefix("x ")], shapes[0])
    if head not in shapes:
        name, _, shape = head.partition(" ")
        return records.values(name, variant, shape) if shape in shapes else records.values(head, variant, shapes[0])
    us = records.values("device_us", variant, head)
    whole_us = records.values("device_us", table.words["ablations_of"], head)
    return us if variant == table.words["ablations_of"] else [one - other for one in us for other in whole_us]


def _values_by_shape(records: RecordsOfTable, head: str, names: list[str], shape: str) -> list[float]:
    first, _, rest = head.partition(" ")
    if rest.startswith("/ "):
        return records.ratios(first, [rest.removeprefix("/ ")], shape)
    if head == "x fastest other":
        return records.ratios(names[0], names[1:], shape)
    return records.values(rest, first, shape) if first in names else records.values(head, names[0], shape)


def _values_by_profiler(saved: list[Record], head: str, text: str) -> list[float]:
    """Counters of Nsight Compute; a duration has its own day in its cell."""
    if head not in ("Nsight Compute, us", "decided by"):
        return []
    of_day = [record for record in saved if head == "decided by" or day_of(record) in DAY.findall(text)]
    kernels = [kernel for report in NsightReport.all_of(of_day) for kernel in report.kernels]
    counters = [value for kernel in kernels for value in kernel.counters.values()]
    return counters if head == "decided by" else [each.counters.get(DURATION, 0.0) / 1000 for each in kernels]


def _cells_of_screen(table: RenderedTable, records: RecordsOfTable) -> Iterator[TableCell]:
    names, shapes = names_in(table.words["variants"]), names_in(table.words["cases"])
    heads: list[str] = []
    shape = ""
    for line in table.body:
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0] == "variant":
            heads = cells
        elif line.partition(" ")[0] in shapes:
            shape = line.partition(" ")[0]
        elif cells[0] in names and len(cells) == len(heads):
            for head, text in zip(heads[1:], cells[1:], strict=True):
                others = [name for name in names if name != cells[0]] if text != "1.000" else [cells[0]]
                values = (
                    records.ratios(cells[0], others, shape)
                    if head == "x baseline"
                    else records.values(head, cells[0], shape)
                )
                if head not in UNMEASURED:
                    yield f"{cells[0]} at {shape}", head, text.removesuffix("!"), values
        elif compared := COMPARED.match(line.strip()):
            variant, number, other, at_shape = compared.groups()
            yield f"{variant} at {at_shape}", f"x {other}", number, records.ratios(variant, [other], at_shape)


# -- what a record has ------------------------------------------------------------------------------------------------


def _values_of(record: Record, head: str, ceilings: Ceilings | None) -> list[float]:
    """What a record has for a column; nothing for a column that is not known here."""
    speed, case = record.speed, record.case
    kernels = [kernel for build in record.builds for kernel in build.kernels]
    if kernels and head in ("regs", "spill B", "MMA instructions"):
        of_kernels: dict[str, list[int]] = {
            "regs": [each.registers_per_thread for each in kernels],
            "spill B": [each.spill_bytes for each in kernels],
            "MMA instructions": [_tensor_instructions(each) for each in kernels],
        }
        return [*map(float, of_kernels[head]), float(sum(of_kernels[head]))]
    if head == "error / allowed":
        bounds = record.check.bounds if record.check else ()
        return [value for bound in bounds for value in (bound.value, bound.allowed) if value is not None]
    if speed is None or case is None:
        return []
    if head == "smem B":
        return [float(each.dynamic_smem_bytes + each.static_smem_bytes) for each in speed.launches]
    if head == "profiler, us" and speed.profiler:
        nodes = speed.profiler.nodes
        return [*(each.mean_us for each in nodes), speed.profiler.profiler_us, float(sum(each.count for each in nodes))]
    us = speed.device.median_us
    values: dict[str, float | None] = {
        "us": us,
        "device_us": us,
        "cold_us": speed.cold.median_us if speed.cold else None,
        "call_us": speed.call.median_us,
        "TFLOP/s": case.flops_per_call / us / 1e6,
        "GB/s": case.bytes_per_call / us / 1e3,
        "SM MHz": speed.clocks_during.sm_mhz if speed.clocks_during else None,
        "clock offset, us": speed.profiler.clock_offset_us if speed.profiler else None,
        "bytes at the copy rate, us": ceilings.copy_us(case) if ceilings else None,
        "% copy": 100 * ceilings.copy_us(case) / us if ceilings else None,
        "% peak": 100 * ceilings.least_us(case) / us if ceilings else None,
    }
    value = values.get(head)
    return [] if value is None else [value]


def _tensor_instructions(kernel: Kernel) -> int:
    return sum(number for opcode, number in kernel.instructions.items() if "MMA" in opcode)


def _shows(figure: str, value: float) -> bool:
    """Whether a figure is this value, rounded to the digits that are written."""
    mantissa, _, exponent = figure.partition("e")
    digits = len(mantissa.partition(".")[2])
    return figure in (f"{value:.{digits}{'e' if exponent else 'f'}}", f"{value:+.{digits}f}", f"{value:g}")


# -- files ------------------------------------------------------------------------------------------------------------


def _problems_of_file(table: RenderedTable) -> Iterator[str]:
    name = UNSEEN if table.kind == "regret" else table.folder.name
    folder = table.folder if table.kind == "regret" else table.folder.parent
    read = {"noise.json": read_noise, "pipes.json": read_pipes}.get(name)
    file = read(folder.parent, folder.name) if read else read_rung_times(folder, name)
    if file is None:
        yield f"there is no {name}"
    elif not table.origin.fits(file.environment, file.measured_at[:10], file.source):
        yield f"{name} has another card, day or commit"
    if name == "pipes.json" and (pipes := read_pipes(folder.parent, folder.name)):
        values = [
            *(value for loop in pipes.loops.values() for value in (loop.median_us, *_clocks(loop.clocks))),
            *itertools.chain(pipes.tflops.values(), pipes.per_clock.values()),
        ]
        heads, *rows = table.rows
        for row in rows:
            for head, text in zip(heads[1:], row[1:], strict=True):
                figures = FIGURE.findall(text)
                yield from (f"{row[0]}, {head}: {each}" for each in figures if not any(_shows(each, v) for v in values))


def _clocks(clocks: Clocks | None) -> tuple[float, ...]:
    return (float(clocks.sm_mhz), clocks.power_watts) if clocks else ()
