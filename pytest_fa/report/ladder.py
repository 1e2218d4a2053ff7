"""The ladder as a table: each rung after its parent, what it changed, and what came of it at some shapes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.built import Kernel
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed
from pytest_fa.report.table import launched_kernels

TENSOR_OPCODES = ("HMMA", "HGMMA")
NOTHING = "-"


class Rung(msgspec.Struct, frozen=True):
    """One row: the variant, how many lines differ from its parent's source, and its records at each shape."""

    variant: Variant
    changed_lines: int | None
    records: tuple[tuple[Record, ...], ...]


def ladder_rows(kernels: Path, profiles: Path, shapes: list[str], against: list[str]) -> list[list[str]]:
    """Heads and rows of the table: every candidate of `kernels`, parents first, then those it is held against.

    Times are `device_us` at each shape; ratios and resources are those at the first.
    """
    found = discover((kernels,)).variants
    candidates = [each for each in found.values() if each.role == "candidate" and _is_in(each, kernels)]
    names = [each.name for each in in_order(candidates)]
    rungs = [Rung(found[name], _changed(found, name), _records(profiles, name, shapes)) for name in (*names, *against)]
    first_us = {rung.variant.name: _device_us(rung.records[0]) for rung in rungs}
    bases = [names[0], *against]
    heads = ["rung", "lines from its parent", "right", *(f"device_us `{shape}`" for shape in shapes)]
    heads += [*(f"x {name}" for name in bases), "tensor instructions", "regs", "spill B", "smem B"]
    return [heads, *(_row(rung, [first_us[name] for name in bases]) for rung in rungs)]


def expectation_rows(kernels: Path, profiles: Path, shapes: list[str]) -> list[list[str]]:
    """Heads and rows: what each rung was expected to bring, as its manifest says, beside `device_us` at each shape."""
    found = discover((kernels,)).variants
    rungs = in_order(each for each in found.values() if each.role == "candidate" and _is_in(each, kernels))
    rows = [["rung", "expected, before it was measured", *(f"device_us `{shape}`" for shape in shapes)]]
    for each in rungs:
        times = [_figure(_device_us(records)) for records in _records(profiles, each.name, shapes)]
        rows.append([f"`{each.name}`", each.expect, *times])
    return rows


def phase_rows(kernels: Path, profiles: Path, name: str, shapes: list[str]) -> list[list[str]]:
    """Heads and rows: `device_us` of a variant at each shape, and how much less it is without each stage."""
    ablations = [each for each in discover((kernels,)).variants.values() if each.omits and each.parent == name]
    whole = [_device_us(records) for records in _records(profiles, name, shapes)]
    rows = [["left out", "by", *(f"`{shape}`" for shape in shapes)]]
    rows.append(["nothing", f"`{name}`", *(f"{_figure(us)} us" for us in whole)])
    for each in ablations:
        left = [_device_us(records) for records in _records(profiles, each.name, shapes)]
        less = [None if us is None or all_us is None else us - all_us for us, all_us in zip(left, whole, strict=True)]
        cells = [NOTHING if us is None else f"{us:+.2f} us" for us in less]
        rows.append([each.omits or "", f"`{each.name}`", *cells])
    return rows


def in_order(variants: Iterable[Variant]) -> list[Variant]:
    """Each variant after its parent, a parent's children in the order of their names."""
    mine = {each.name: each for each in variants}
    ordered: list[Variant] = []

    def add(parent: str | None) -> None:
        children = (each for each in mine.values() if (each.parent if each.parent in mine else None) == parent)
        for each in sorted(children, key=lambda child: (child.parent is None and not child.is_built, child.name)):
            ordered.append(each)
            add(each.name)

    add(None)
    return ordered


def _row(rung: Rung, bases_us: list[float | None]) -> list[str]:
    all_records = [record for records in rung.records for record in records]
    judged = [each for each in all_records if each.check is not None or each.outcome != "ok"]
    mine = _device_us(rung.records[0])
    built = [each for each in rung.records[0] if each.builds]
    kernels = launched_kernels(built) if built else []
    speed = next((each.speed for each in rung.records[0] if each.speed), None)
    return [
        f"`{rung.variant.name}`",
        str(rung.changed_lines) if rung.changed_lines is not None else NOTHING,
        f"{sum(each.outcome == 'ok' for each in judged)}/{len(judged)}" if judged else "not measured",
        *(_figure(_device_us(records)) for records in rung.records),
        *(_figure(mine / base if mine and base else None, 3) for base in bases_us),
        *_resources(kernels, speed),
    ]


def _resources(kernels: list[Kernel], speed: Speed | None) -> list[str]:
    if not kernels:
        return [NOTHING] * 4
    launches = speed.launches if speed else ()
    smem = max((each.dynamic_smem_bytes + each.static_smem_bytes for each in launches), default=None)
    tensor = sum(kernel.instructions.get(opcode, 0) for kernel in kernels for opcode in TENSOR_OPCODES)
    registers = max(kernel.registers_per_thread for kernel in kernels)
    spills = sum(kernel.spill_bytes for kernel in kernels)
    return [str(tensor), str(registers), str(spills), str(smem) if smem is not None else NOTHING]


def _changed(found: dict[str, Variant], name: str) -> int | None:
    """Lines added and removed between a source and its parent's; None where they are one, or one of them is none."""
    mine, parent = found[name], found.get(found[name].parent or "")
    if parent is None or parent.folder == mine.folder:
        return None
    paths = [Path(each.folder) / each.entry.source for each in (parent, mine)]
    if not all(each.entry.kind == "cuda" for each in (parent, mine)):
        return None
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in paths)
    return sum(line[0] in "+-" for line in difflib.ndiff(before, after))


def _records(profiles: Path, name: str, shapes: list[str]) -> tuple[tuple[Record, ...], ...]:
    """The records of each shape; none where it was not run."""
    found = [
        each for each in read_records(profiles / f"{name}.jsonl") if each.case and each.kind in ("correct", "speed")
    ]
    return tuple(tuple(each for each in found if each.case and each.case.shape_id == shape) for shape in shapes)


def _device_us(records: tuple[Record, ...]) -> float | None:
    return next((each.speed.device.median_us for each in records if each.speed), None)


def _figure(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _is_in(variant: Variant, kernels: Path) -> bool:
    return Path(variant.root) == kernels.resolve()
