"""The ladder as a table: each rung below its parent, with the number of changed lines and its times."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.built import Kernel
from pytest_fa.records.log import read_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Speed
from pytest_fa.table.rows import launched_kernels

TENSOR_OPCODES = ("HMMA", "HGMMA", "QMMA", "QGMMA")
NOTHING = "-"


class Rung(msgspec.Struct, frozen=True):
    """One row: the variant, the number of lines that differ from its parent's source, and its records by shape."""

    variant: Variant
    changed_lines: int | None
    records: tuple[tuple[Record, ...], ...]


def ladder_rows(kernels: Path, profiles: Path, shapes: list[str], against: list[str]) -> list[list[str]]:
    """The header and the rows: every candidate of `kernels`, parents first, then the variants of `against`.

    Times are `device_us` at each shape; ratios and resources are those at the first shape.
    """
    variants = _variants(kernels)
    candidates = [each for each in variants.values() if each.role == "candidate" and _is_in(each, kernels)]
    names = [each.name for each in in_order(candidates)]
    rungs = [
        Rung(variants[name], _count_changed_lines(variants, name), _records(profiles, name, shapes))
        for name in (*names, *against)
    ]
    first_us = {rung.variant.name: _device_us(rung.records[0]) for rung in rungs}
    compared = [names[0], *against]
    heads = ["rung", "changed lines", "checks passed", *(f"device_us `{shape}`" for shape in shapes)]
    heads += [*(f"x {name}" for name in compared), "MMA instructions", "regs", "spill B", "smem B"]
    return [heads, *(_row(rung, [first_us[name] for name in compared]) for rung in rungs)]


def _variants(kernels: Path) -> dict[str, Variant]:
    """The variants of `kernels` and the built-in ones, by name.  Raises `UnusableRun` if two have the same name."""
    catalog = discover((kernels,))
    catalog.require_unique_names()
    return catalog.variants


def expectation_rows(kernels: Path, profiles: Path, shapes: list[str], names: list[str]) -> list[list[str]]:
    """The header and the rows: the manifest's `expect` of each rung, and its `device_us` at each shape.

    If `names` is not empty, only these rungs have a row.
    """
    variants = _variants(kernels)
    candidates = (each for each in variants.values() if each.role == "candidate" and _is_in(each, kernels))
    rungs = [rung for rung in in_order(candidates) if not names or rung.name in names]
    rows = [["rung", "expected, before it was measured", *(f"device_us `{shape}`" for shape in shapes)]]
    for rung in rungs:
        times = [_marked_us(records) for records in _records(profiles, rung.name, shapes)]
        rows.append([f"`{rung.name}`", rung.expect, *times])
    return rows


def shape_rows(
    profiles: Path, shapes: list[str], names: list[str], against: str, kernel_of: str = ""
) -> list[list[str]]:
    """The header and a row for each shape: TFLOP/s and `device_us` of each variant, and ratios of the times.

    A ratio is the time of a variant divided by that of `against`.  A time that no other clock confirms has a `!` and no
    ratio.  For `kernel_of`, one of the names, two columns more show the kernel and the SM clock.
    """
    others = [name for name in names if name != against]
    heads = [text for name in names for text in (f"`{name}` TFLOP/s", f"`{name}` us")]
    rows = [["shape", *heads, *(f"`{name}` / `{against}`" for name in others)]]
    rows[0] += [f"kernel of `{kernel_of}`", "SM MHz"] if kernel_of else []
    columns = {name: _records(profiles, name, shapes) for name in names}
    for number, shape in enumerate(shapes):
        records = {name: column[number] for name, column in columns.items()}
        us = {name: _device_us(of_shape) for name, of_shape in records.items()}
        cells = [text for name in names for text in (_tflops(records[name], us[name]), _marked_us(records[name]))]
        confirmed_us = {name: None if _is_unconfirmed(records[name]) else us[name] for name in names}
        ratios = [_ratio(confirmed_us[name], confirmed_us[against]) for name in others]
        details = _kernel_and_clock(records[kernel_of]) if kernel_of else []
        rows.append([f"`{shape}`", *cells, *ratios, *details])
    return rows


def _kernel_and_clock(records: tuple[Record, ...]) -> list[str]:
    """The template arguments of the kernels that were timed, and the SM clock that was read while such calls ran."""
    timed = next((each for each in records if each.speed), None)
    if timed is None or timed.speed is None:
        return [NOTHING, NOTHING]
    names = [kernel.name for kernel in launched_kernels([timed])] if timed.speed.launches else []
    arguments = [name.partition("<")[2].rpartition(">")[0].strip() or name for name in names]
    clocks = timed.speed.clocks_during
    return [", ".join(f"`{each}`" for each in arguments) or NOTHING, str(clocks.sm_mhz) if clocks else NOTHING]


def _tflops(records: tuple[Record, ...], us: float | None) -> str:
    case = next((each.case for each in records if each.case), None)
    return f"{case.flops_per_call / us / 1e6:.0f}" if case and us else NOTHING


def _is_unconfirmed(records: tuple[Record, ...]) -> bool:
    return any(is_unconfirmed(record.speed) for record in records if record.speed)


def _ratio(us: float | None, other_us: float | None) -> str:
    return f"{us / other_us:.3f}" if us and other_us else NOTHING


def phase_rows(kernels: Path, profiles: Path, name: str, shapes: list[str]) -> list[list[str]]:
    """The header and the rows: `device_us` of a variant at each shape, and the difference without each phase."""
    ablations = [each for each in _variants(kernels).values() if each.omits and each.parent == name]
    whole_us = [_device_us(records) for records in _records(profiles, name, shapes)]
    rows = [["omitted phase", "measured by", *(f"`{shape}`" for shape in shapes)]]
    rows.append(["nothing", f"`{name}`", *(f"{_figure(us)} us" for us in whole_us)])
    for ablation in ablations:
        ablated_us = [_device_us(records) for records in _records(profiles, ablation.name, shapes)]
        pairs = zip(ablated_us, whole_us, strict=True)
        differences_us = [None if us is None or whole is None else us - whole for us, whole in pairs]
        cells = [NOTHING if us is None else f"{us:+.2f} us" for us in differences_us]
        rows.append([ablation.omits or "", f"`{ablation.name}`", *cells])
    return rows


def in_order(variants: Iterable[Variant]) -> list[Variant]:
    """Each variant directly below its parent, the children of one parent sorted by name."""
    by_name = {variant.name: variant for variant in variants}
    ordered: list[Variant] = []

    def add_children(parent: str | None) -> None:
        children = (each for each in by_name.values() if (each.parent if each.parent in by_name else None) == parent)
        for child in sorted(children, key=lambda child: (child.parent is None and not child.is_built, child.name)):
            ordered.append(child)
            add_children(child.name)

    add_children(None)
    return ordered


def _row(rung: Rung, compared_us: list[float | None]) -> list[str]:
    all_records = [record for records in rung.records for record in records]
    judged = [each for each in all_records if each.check is not None or each.outcome != Outcome.OK]
    rung_us = _device_us(rung.records[0])
    built = [each for each in rung.records[0] if each.builds]
    kernels = launched_kernels(built) if built else []
    speed = next((each.speed for each in rung.records[0] if each.speed), None)
    return [
        f"`{rung.variant.name}`",
        str(rung.changed_lines) if rung.changed_lines is not None else NOTHING,
        f"{sum(each.outcome == Outcome.OK for each in judged)}/{len(judged)}" if judged else "not measured",
        *(_marked_us(records) for records in rung.records),
        *(_figure(rung_us / us if rung_us and us else None, 3) for us in compared_us),
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


def _count_changed_lines(variants: dict[str, Variant], name: str) -> int | None:
    """The number of lines added and removed between the parent's CUDA source and the variant's.

    None without a parent, if both have the same source, or if one of them is not a `cuda` entry.
    """
    variant, parent = variants[name], variants.get(variants[name].parent or "")
    if parent is None or parent.folder == variant.folder:
        return None
    paths = [Path(each.folder) / each.entry.source for each in (parent, variant)]
    if not all(each.entry.kind == "cuda" for each in (parent, variant)):
        return None
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in paths)
    return sum(line[0] in "+-" for line in difflib.ndiff(before, after))


def _records(profiles: Path, name: str, shapes: list[str]) -> tuple[tuple[Record, ...], ...]:
    """The records of `test_correct` and `test_speed` at each shape."""
    records = [
        each for each in read_records(profiles / f"{name}.jsonl") if each.case and each.kind in ("correct", "speed")
    ]
    return tuple(tuple(each for each in records if each.case and each.case.shape_id == shape) for shape in shapes)


def _device_us(records: tuple[Record, ...]) -> float | None:
    return next((each.speed.device.median_us for each in records if each.speed), None)


def _marked_us(records: tuple[Record, ...]) -> str:
    """The time of a variant at one shape, with a `!` if no other clock confirms it."""
    return _figure(_device_us(records)) + ("!" if _is_unconfirmed(records) else "")


def _figure(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _is_in(variant: Variant, kernels: Path) -> bool:
    return Path(variant.root) == kernels.resolve()
