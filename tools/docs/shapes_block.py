"""`fa-shapes`: a table with a row for each shape, which compares variants there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.records.ceilings import NAME as CEILINGS
from pytest_fa.records.ceilings import Ceilings, read_ceilings
from pytest_fa.records.timing import Speed
from pytest_fa.table.rows import launched_kernels
from tools.docs.block import (
    NOTHING,
    AtShape,
    Shown,
    TableProblem,
    device_us,
    figure,
    is_contradicted,
    marked_us,
    names_in,
    one_of,
    ratio,
    read_words,
    records_at,
    some_names_in,
    table,
    with_origin,
)


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of the comment; lists have commas.

    A column about one variant is about the first of `variants`.  `ratios` divides the times of the others by that of
    `against`.
    """

    profiles: str
    columns: str
    cases: str
    variants: str
    against: str = ""


class Row(msgspec.Struct, frozen=True):
    """What a row is made from: the records of each variant at one shape, and the ceilings of the GPU."""

    records: dict[str, AtShape]
    against: str
    ceilings: Ceilings | None

    @property
    def own(self) -> AtShape:
        """The records of the first variant."""
        return next(iter(self.records.values()))


def block(words: str, root: Path) -> str:
    """The table that the words of a comment describe.  Raises `TableProblem` for words or records that do not exist."""
    spec = read_words(words, Spec)
    shapes, names = some_names_in(spec.cases, "cases"), some_names_in(spec.variants, "variants")
    columns = [one_of(name, COLUMNS, "a column of fa-shapes") for name in names_in(spec.columns)]
    folder = root / spec.profiles
    if "ratios" in names_in(spec.columns):
        one_of(spec.against, dict.fromkeys(names), "against")
    measured = {name: records_at(folder, name, shapes) for name in names}
    if not any(measured[names[0]]):
        raise TableProblem(f"no record of {names[0]} at {spec.cases} in {spec.profiles}")
    ceilings = _ceilings(folder, spec) if NEEDS_CEILINGS & {*names_in(spec.columns)} else None
    rows = [["shape", *(head for heads_of, _ in columns for head in heads_of(names, spec.against))]]
    for number, shape in enumerate(shapes):
        row = Row({name: column[number] for name, column in measured.items()}, spec.against, ceilings)
        rows.append([f"`{shape}`", *(cell for _, cells in columns for cell in cells(row))])
    shown = (record for column in measured.values() for at_shape in column for record in at_shape)
    return with_origin(table(rows), shown)


def contents(words: str, _root: Path) -> Shown:
    """What the table shows that was measured.  Raises `TableProblem` for words that cannot be read."""
    spec = read_words(words, Spec)
    shapes, names = some_names_in(spec.cases, "cases"), some_names_in(spec.variants, "variants")
    files = (CEILINGS,) if NEEDS_CEILINGS & {*names_in(spec.columns)} else ()
    return Shown(spec.profiles, tuple(names), tuple(shapes), ("speed",), files=files)


def _ceilings(folder: Path, spec: Spec) -> Ceilings:
    ceilings = read_ceilings(folder.parent, folder.name)
    if ceilings is None:
        raise TableProblem(f"there is no ceilings.json in {spec.profiles}; `python -m pytest_fa ceilings` makes one")
    return ceilings


# -- cells ------------------------------------------------------------------------------------------------------------


def _timed(records: AtShape) -> tuple[Case, Speed] | None:
    return next(((each.case, each.speed) for each in records if each.case and each.speed), None)


def _rates(row: Row) -> Iterator[str]:
    for records in row.records.values():
        timed = _timed(records)
        yield f"{timed[0].flops_per_call / timed[1].device.median_us / 1e6:.0f}" if timed else NOTHING
        yield marked_us(records)


def _times(row: Row) -> Iterator[str]:
    yield from map(marked_us, row.records.values())


def _ratios(row: Row) -> Iterator[str]:
    """The times of the other variants; a time that no other clock confirms has none."""
    us = {name: None if is_contradicted(records) else device_us(records) for name, records in row.records.items()}
    yield from (ratio(us[name], us[row.against]) for name in row.records if name != row.against)


def _kernel(row: Row) -> Iterator[str]:
    """The template arguments of the kernels that were timed."""
    timed = next((each for each in row.own if each.speed), None)
    kernels = launched_kernels([timed]) if timed and timed.speed and timed.speed.launches else []
    arguments = [each.name.partition("<")[2].rpartition(">")[0].strip() or each.name for each in kernels]
    yield ", ".join(f"`{each}`" for each in arguments) or NOTHING


def _sm_mhz(row: Row) -> Iterator[str]:
    timed = _timed(row.own)
    clocks = timed[1].clocks_during if timed else None
    yield str(clocks.sm_mhz) if clocks else NOTHING


def _copy_us(row: Row) -> Iterator[str]:
    timed = _timed(row.own)
    yield figure(row.ceilings.copy_us(timed[0]) if timed and row.ceilings else None, 1)


def _cold_and_hot(row: Row) -> Iterator[str]:
    for records in row.records.values():
        timed = _timed(records)
        yield figure(timed[1].cold.median_us if timed and timed[1].cold else None)
        yield marked_us(records)


def _gigabytes(row: Row) -> Iterator[str]:
    timed = _timed(row.own)
    yield figure(timed[0].bytes_per_call / timed[1].device.median_us / 1e3 if timed else None, 0)


def _copy_share(row: Row) -> Iterator[str]:
    timed = _timed(row.own)
    share = row.ceilings.copy_us(timed[0]) / timed[1].device.median_us if timed and row.ceilings else None
    yield figure(None if share is None else 100 * share, 0)


def _to_fastest(row: Row) -> Iterator[str]:
    """The time divided by that of the fastest other variant; the period of overlapping calls is not compared."""
    own_us, *others_us = (_comparable_us(records) for records in row.records.values())
    yield ratio(own_us, min((us for us in others_us if us), default=None))


def _comparable_us(records: AtShape) -> float | None:
    timed = _timed(records)
    is_comparable = timed and timed[1].order != "programmatic" and not is_contradicted(records)
    return device_us(records) if is_comparable else None


Heads = Callable[[list[str], str], list[str]]  # of the variants, and of `against`
Cells = Callable[[Row], Iterator[str]]


def _titled(head: str) -> Heads:
    return lambda _names, _against: [head]


def _of_each(*heads: str) -> Heads:
    return lambda names, _against: [f"`{name}` {head}" for name in names for head in heads]


COLUMNS: dict[str, tuple[Heads, Cells]] = {
    "times": (_of_each("us"), _times),
    "rates": (_of_each("TFLOP/s", "us"), _rates),
    "ratios": (lambda names, against: [f"`{name}` / `{against}`" for name in names if name != against], _ratios),
    "kernel": (lambda names, _against: [f"kernel of `{names[0]}`"], _kernel),
    "sm_mhz": (_titled("SM MHz"), _sm_mhz),
    "copy_us": (_titled("bytes at the copy rate, us"), _copy_us),
    "cold_and_hot": (_of_each("cold_us", "device_us"), _cold_and_hot),
    "gigabytes": (_titled("GB/s"), _gigabytes),
    "copy_share": (_titled("% copy"), _copy_share),
    "to_fastest": (_titled("x fastest other"), _to_fastest),
}
NEEDS_CEILINGS = {"copy_us", "copy_share"}
