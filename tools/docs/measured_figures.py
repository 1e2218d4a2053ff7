"""Finds measured figures in the prose of pages, and says which of them no saved record has.

    python -m tools.docs.measured_figures FILE...    list the figures that lack something; exit with 1 if there are some

A measured figure is a number with us, ms, TFLOP/s or GB/s, or a ratio such as 0.42x, outside of generated blocks and of
code.  In its paragraph stand the card, the day (YYYY-MM-DD) and the commit of the records that have it, and the name of
the variant, or that part of it which people say (`cuDNN` for `sdpa_cudnn`).  Days may be a range, `2026-11-21 to
2026-11-24`.  A table and the paragraph below it count as one paragraph.

Figures that are not measured are limits that a constant of the code has (`CLOCK_US = 0.1`), and those of a paragraph
with a comment `<!-- not measured: why -->`.  A measured figure without a record is allowed if its paragraph says
'no record'.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.ceilings import read_ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Environment, Record, Source
from pytest_fa.records.standing import day_of
from pytest_fa.records.timing import Speed
from tools.docs.pipes import read_pipes

NUMBER = r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?"
UNITS = {"us": "us", "µs": "us", "ms": "ms", "TFLOP/s": "TFLOP/s", "GB/s": "GB/s", "x": "x", "×": "x"}  # noqa: RUF001
FIGURE = re.compile(
    rf"(?:(?P<first>{NUMBER})\s?(?:to|and|or|-|–)\s?)?(?P<last>{NUMBER}|(?<=[-–])\d[\d,]*(?:\.\d+)?)\s?"  # noqa: RUF001
    r"(?P<unit>us|µs|ms|TFLOP/s|GB/s|x|×)(?![\w/])(?!\s*\d)"  # noqa: RUF001
)
DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b")
NO_RECORD, NOT_MEASURED, NO_COMMIT = "no record", "<!-- not measured:", "without a commit"
HIDDEN = re.compile(
    r"<!-- (?P<name>[a-z-]+)[^\n]*-->\n.*?<!-- /(?P=name) -->|^[ >]*(?P<fence>```+|~~~+).*?^[ >]*(?P=fence)",
    re.DOTALL | re.MULTILINE,
)
LIMITS = {"us": "_US", "ms": "_MS", "x": "NEAR"}  # with what the names of constants of such a unit end
US_PER_MS = MS_PER_SECOND = 1000.0


class Figure(NamedTuple):
    """A figure of a page: its line, its number as it is written, and its unit."""

    line: int
    number: str
    unit: str

    @property
    def digits(self) -> int:
        """The digits behind the decimal point."""
        return len(self.number.partition(".")[2])

    def shows(self, value: float) -> bool:
        """Whether the number is this value, rounded to the digits that are written."""
        return f"{value:.{self.digits}f}" == self.number.replace(",", "")


class Paragraph(NamedTuple):
    """A paragraph of a page, and the number of its first line."""

    line: int
    text: str

    @property
    def figures(self) -> Iterator[Figure]:
        """Its figures in their order; of a range both ends."""
        for match in FIGURE.finditer(self.text):
            line = self.line + self.text.count("\n", 0, match.start("last"))
            unit = UNITS[match["unit"]]
            yield from (Figure(line, number, unit) for number in (match["first"], match["last"]) if number)


class Measured(NamedTuple):
    """A value of a saved file: what it was measured with, and when.

    Times with the same `clock` at the same shape can be compared.  The files of a GPU itself have no variant, and some
    have no day.
    """

    variant: str
    card: str
    day: str
    commit: str
    unit: str
    value: float
    clock: str = ""


class Problem(NamedTuple):
    """A figure that lacks something, and what."""

    figure: Figure
    missing: str

    def __str__(self) -> str:
        """The line of the page, the figure, and what is missing."""
        return f"{self.figure.line}: {self.figure.number} {self.figure.unit}: {self.missing}"


def problems_of(text: str, profiles: Path, package: Path) -> list[Problem]:
    """The figures of a page that no saved record has with the card, day and commit of their paragraph."""
    problems = []
    for paragraph in paragraphs_of(text):
        if NOT_MEASURED in paragraph.text or NO_RECORD in paragraph.text:
            continue
        figures = [each for each in paragraph.figures if not is_limit(each, package)]
        if figures:
            problems += _problems_of_paragraph(paragraph.text, figures, measured_values(profiles))
    return problems


def _problems_of_paragraph(text: str, figures: list[Figure], values: tuple[Measured, ...]) -> list[Problem]:
    days, commits = DAY.findall(text), COMMIT.findall(text)
    on_card = [each for each in values if each.card.removeprefix("NVIDIA ") in text]
    missing = [
        *(["the card"] if not on_card else []),
        *(["the day"] if not days else []),
        *(["the commit"] if not commits and NO_COMMIT not in text else []),
    ]
    if missing:
        return [Problem(each, f"its paragraph has not {', '.join(missing)}") for each in figures]
    of_days = [each for each in on_card if not each.day or min(days) <= each.day <= max(days)]
    named = [each for each in of_days if _has_commit(each, commits, text) and _is_named(each.variant, text)]
    return [
        Problem(each, "no record of its card, day, commit and variant has it")
        for each in figures
        if not any(value.unit == each.unit and each.shows(value.value) for value in named)
        and not (each.unit == "x" and any(map(each.shows, _ratios(named))))
    ]


def _has_commit(value: Measured, commits: list[str], text: str) -> bool:
    return any(value.commit.startswith(each) for each in commits) if value.commit else NO_COMMIT in text


def _is_named(variant: str, text: str) -> bool:
    return _plain(variant.removeprefix("sdpa_")) in _plain(text)


def _plain(text: str) -> str:
    return re.sub(r"[\s_`*-]", "", text.lower())


def _ratios(values: Iterable[Measured]) -> Iterator[float]:
    """The ratio of every two times by one clock at one shape, of the variants that the paragraph names."""
    times = [each for each in values if each.unit == "us" and each.clock and each.value > 0]
    pairs = itertools.permutations(times, 2)
    yield from (one.value / other.value for one, other in pairs if one.clock == other.clock)


# -- pages ------------------------------------------------------------------------------------------------------------


def paragraphs_of(text: str) -> list[Paragraph]:
    """The paragraphs of a page without generated blocks and code; a table and what follows it are one."""
    shown = HIDDEN.sub(lambda hidden: "\n" * hidden[0].count("\n"), text)
    paragraphs: list[Paragraph] = []
    for match in re.finditer(r"(?:[^\n]*\S[^\n]*(?:\n|$))+", shown):
        if paragraphs and _ends_with_table(paragraphs[-1].text):
            before = paragraphs.pop()
            gap = "\n" * (shown.count("\n", 0, match.start()) + 1 - before.line - before.text.count("\n"))
            paragraphs.append(Paragraph(before.line, before.text + gap + match[0]))
        else:
            paragraphs.append(Paragraph(shown.count("\n", 0, match.start()) + 1, match[0]))
    return paragraphs


def _ends_with_table(text: str) -> bool:
    return text.splitlines()[-1].startswith("|")


# -- limits of the code -----------------------------------------------------------------------------------------------


def is_limit(figure: Figure, package: Path) -> bool:
    """Whether a constant of the code has this number and unit, so that it is a limit and was not measured."""
    return any(unit == figure.unit and figure.shows(value) for unit, value in limits_of(package))


@functools.cache
def limits_of(package: Path) -> frozenset[tuple[str, float]]:
    """The constants of a package whose names end with a unit, as unit and number; seconds are in ms, too."""
    limits: set[tuple[str, float]] = set()
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
                limits |= {each for name in names for each in _limits(name, node.value.value)}
    return frozenset(limits)


def _limits(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield from ((unit, value) for unit, end in LIMITS.items() if name.endswith(end))
        if name.endswith("_SECONDS"):
            yield "ms", value * MS_PER_SECOND


# -- saved values -----------------------------------------------------------------------------------------------------


@functools.cache
def measured_values(profiles: Path) -> tuple[Measured, ...]:
    """The times, rates and ratios of every saved record, and the figures of the other files of each GPU."""
    folders = sorted(path for path in profiles.iterdir() if path.is_dir())
    records = (record for folder in folders for path in sorted(folder.glob("*.jsonl")) for record in read_records(path))
    of_records = (value for record in records for value in _values_of(record))
    return (*of_records, *(value for folder in folders for value in _values_of_files(folder)))


def _values_of(record: Record) -> Iterator[Measured]:
    place = (record.variant, _card(record.environment), day_of(record), record.source.commit or "")
    if record.speed and record.case:
        us = record.speed.device.median_us
        for clock, time_us in _times_us(record.speed):
            if time_us is not None:
                yield Measured(*place, "us", time_us, f"{clock} at {record.case.shape_id}")
                yield Measured(*place, "ms", time_us / US_PER_MS)
        yield Measured(*place, "TFLOP/s", record.case.flops_per_call / us / 1e6)
        yield Measured(*place, "GB/s", record.case.bytes_per_call / us / 1e3)
    gate = Gate.of(record)
    for pair in gate.pairs if gate else ():
        yield from (Measured(*place, "x", value) for value in (pair.ratio, pair.low, pair.high) if value is not None)


def _times_us(speed: Speed) -> Iterator[tuple[str, float | None]]:
    """The times of a record by every clock."""
    timings = {"device": speed.device, "cold": speed.cold, "call": speed.call}
    yield from ((name, timing.median_us) for name, timing in timings.items() if timing)
    yield "launch overhead", speed.launch_overhead_us
    if speed.profiler:
        yield "profiler", speed.profiler.profiler_us
        yield "clock offset", speed.profiler.clock_offset_us
    if speed.outside:
        yield "judge", speed.outside.median_us
        yield "judge, whole run", speed.outside.whole_us
        yield "judge, proof sample", speed.outside.proof_us


def _values_of_files(folder: Path) -> Iterator[Measured]:
    """The figures of `ceilings.json` and `pipes.json`."""
    root, gpu = folder.parent, folder.name
    if ceilings := read_ceilings(root, gpu):
        place = _place_of_file(ceilings.environment, ceilings.source, ceilings.measured_at)
        yield Measured(*place, "us", ceilings.empty_launch_us)
        yield from (Measured(*place, "TFLOP/s", rate) for rate in ceilings.matmul_tflops.values())
        rates = (ceilings.copy_gb_per_s, ceilings.l2_copy_gb_per_s)
        yield from (Measured(*place, "GB/s", rate) for rate in rates if rate)
    if pipes := read_pipes(root, gpu):
        place = _place_of_file(pipes.environment, pipes.source, pipes.measured_at)
        yield from (Measured(*place, "us", loop.median_us) for loop in pipes.loops.values())
        yield from (Measured(*place, "TFLOP/s", rate) for rate in pipes.tflops.values())


def _place_of_file(environment: Environment, source: Source | None, measured_at: str) -> tuple[str, str, str, str]:
    return "", _card(environment), measured_at[:10], (source.commit if source else None) or ""


def _card(environment: Environment) -> str:
    return environment.gpu or environment.cpu


def main(arguments: list[str]) -> int:
    """List the problems of pages; return 1 if there are some."""
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    lines = [
        f"{name}:{problem}"
        for name in arguments
        for problem in problems_of(Path(name).read_text(encoding="utf-8"), Path("profiles"), Path("pytest_fa"))
    ]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
