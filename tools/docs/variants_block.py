"""`fa-variants`: a table with a row for each variant, for each rung of the ladder, or for each ablation of a rung."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.built import Kernel
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import RecordKind
from pytest_fa.table.rows import launched_kernels
from tools.docs.block import (
    NOTHING,
    AtShape,
    Shown,
    TableProblem,
    device_us,
    figure,
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
from tools.docs.source_counts import changed_lines, source_of

TENSOR_OPCODES = ("HMMA", "HGMMA", "QMMA", "QGMMA")


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of the comment; lists have commas.

    With `kernels`, the rows are the candidates of that folder, each below its parent, or those that `variants` names;
    with `ablations_of`, the rung of that name and its ablations.  The variants of `against` follow, if they have no row
    yet.  Without `kernels`, the rows are `variants` in that order, and each of them must have records.
    """

    profiles: str
    columns: str
    cases: str
    kernels: str = ""
    variants: str = ""
    ablations_of: str = ""
    against: str = ""


class Row(msgspec.Struct, frozen=True):
    """What a row is made from: the variant, its records by shape, and the times of the variants it is compared with."""

    name: str
    at_shapes: list[AtShape]
    compared_us: list[float | None] = []
    whole_us: list[float | None] = []
    catalog: dict[str, Variant] = {}

    @property
    def variant(self) -> Variant:
        """What the manifest says.  Raises `TableProblem` for a variant that is not in the folder `kernels`."""
        if self.name not in self.catalog:
            raise TableProblem(f"{self.name} has no manifest; name its folder with `kernels`")
        return self.catalog[self.name]

    @property
    def first(self) -> AtShape:
        """The records at the first shape."""
        return self.at_shapes[0]

    @property
    def first_us(self) -> float | None:
        """The time at the first shape."""
        return device_us(self.first)

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels that were launched at the first shape; none if nothing was built."""
        built = [each for each in self.first if each.builds]
        return launched_kernels(built) if built else []


def block(words: str, root: Path) -> str:
    """The table that the words of a comment describe.  Raises `TableProblem` for words or records that do not exist."""
    spec = read_words(words, Spec)
    shapes, against = some_names_in(spec.cases, "cases"), names_in(spec.against)
    columns = [one_of(name, COLUMNS, "a column of fa-variants") for name in names_in(spec.columns)]
    catalog = _variants(root / spec.kernels) if spec.kernels else {}
    names = _rows(spec, root, catalog)
    if "saved_us" in names_in(spec.columns) and not spec.ablations_of:
        raise TableProblem("the column saved_us needs ablations_of")
    measured = {name: records_at(root / spec.profiles, name, shapes) for name in dict.fromkeys((*names, *against))}
    if not spec.kernels:
        _require_records(measured, spec)
    compared_us = [device_us(measured[name][0]) for name in against]
    whole_us = [device_us(records) for records in measured.get(spec.ablations_of, [])]
    rows = [Row(name, at_shapes, compared_us, whole_us, catalog) for name, at_shapes in measured.items()]
    heads = [head for heads_of, _ in columns for head in heads_of(shapes, against)]
    text = table([heads, *([cell for _, cells in columns for cell in cells(row)] for row in rows)])
    shown = (record for at_shapes in measured.values() for at_shape in at_shapes for record in at_shape)
    return with_origin(text, shown, has_checks="checks" in names_in(spec.columns))


def contents(words: str, root: Path) -> Shown:
    """What the table shows that was measured.  Raises `TableProblem` for words that cannot be read."""
    spec = read_words(words, Spec)
    catalog = _variants(root / spec.kernels) if spec.kernels else {}
    names = dict.fromkeys((*_rows(spec, root, catalog), *names_in(spec.against)))
    kinds: tuple[RecordKind, ...] = ("correct", "speed") if "checks" in names_in(spec.columns) else ("speed",)
    return Shown(spec.profiles, tuple(names), tuple(some_names_in(spec.cases, "cases")), kinds)


def _rows(spec: Spec, root: Path, catalog: dict[str, Variant]) -> list[str]:
    if not spec.kernels:
        return names_in(spec.variants)
    if spec.ablations_of:
        ablations = [each.name for each in catalog.values() if each.omits and each.parent == spec.ablations_of]
        if not ablations:
            raise TableProblem(f"{spec.ablations_of} has no ablations in {spec.kernels}")
        return [spec.ablations_of, *ablations]
    folder = str((root / spec.kernels).resolve())
    rungs = in_order(each for each in catalog.values() if each.role == "candidate" and each.root == folder)
    return [rung.name for rung in rungs if not spec.variants or rung.name in names_in(spec.variants)]


def _require_records(measured: dict[str, list[AtShape]], spec: Spec) -> None:
    for name, at_shapes in measured.items():
        if not at_shapes[0]:
            raise TableProblem(f"no record of {name} at {names_in(spec.cases)[0]} in {spec.profiles}")


@functools.cache  # a page has many blocks of the same kernels
def _variants(kernels: Path) -> dict[str, Variant]:
    """The variants of `kernels` and the built-in ones, by name.  Raises `UnusableRun` if two have the same name."""
    catalog = discover((kernels,))
    catalog.require_unique_names()
    return catalog.variants


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


# -- cells ------------------------------------------------------------------------------------------------------------


def _name(row: Row) -> Iterator[str]:
    yield f"`{row.name}`"


def _changed_lines(row: Row) -> Iterator[str]:
    """The number of lines added and removed between the parent's CUDA source and the variant's.

    There is none without a parent, if both have the same source, or if one of them is not a `cuda` entry.
    """
    variant, parent = row.variant, row.catalog.get(row.variant.parent or "")
    if parent is None or parent.folder == variant.folder or {parent.entry.kind, variant.entry.kind} != {"cuda"}:
        yield NOTHING
        return
    yield str(changed_lines(source_of(parent), source_of(variant)))


def _lines(row: Row) -> Iterator[str]:
    """The number of lines of the CUDA source."""
    is_cuda = row.variant.entry.kind == "cuda"
    yield str(len(source_of(row.variant).splitlines())) if is_cuda else NOTHING


def _checks(row: Row) -> Iterator[str]:
    records = [each for at_shape in row.at_shapes for each in at_shape]
    judged = [each for each in records if each.check is not None or each.outcome != Outcome.OK]
    passed = f"{sum(each.outcome == Outcome.OK for each in judged)}/{len(judged)}"
    yield passed if judged else "not checked" if records else "not measured"


def _expected(row: Row) -> Iterator[str]:
    yield row.variant.expect


def _device_us(row: Row) -> Iterator[str]:
    yield from map(marked_us, row.at_shapes)


def _call_us(row: Row) -> Iterator[str]:
    yield figure(next((each.speed.call.median_us for each in row.first if each.speed), None))


def _has_work(row: Row) -> bool:
    return bool(row.first) and row.first[0].role != "overhead"


def _tflops(row: Row) -> Iterator[str]:
    case, us = next((each.case for each in row.first if each.case), None), row.first_us
    yield figure(case.flops_per_call / us / 1e6 if case and us and _has_work(row) else None)


def _ratios(row: Row) -> Iterator[str]:
    us = row.first_us if _has_work(row) else None
    yield from (ratio(us, other_us) for other_us in row.compared_us)


def _omitted(row: Row) -> Iterator[str]:
    yield row.variant.omits or "nothing"


def _saved_us(row: Row) -> Iterator[str]:
    """The time of the whole rung; of an ablation, the difference to it."""
    for records, whole_us in zip(row.at_shapes, row.whole_us, strict=True):
        us = device_us(records)
        if not row.variant.omits:
            yield f"{figure(us)} us"
        else:
            yield NOTHING if us is None or whole_us is None else f"{us - whole_us:+.2f} us"


def _mma(row: Row) -> Iterator[str]:
    count = sum(kernel.instructions.get(opcode, 0) for kernel in row.kernels for opcode in TENSOR_OPCODES)
    yield str(count) if row.kernels else NOTHING


def _registers(row: Row) -> Iterator[str]:
    yield str(max((kernel.registers_per_thread for kernel in row.kernels), default=NOTHING))


def _spills(row: Row) -> Iterator[str]:
    yield str(sum(kernel.spill_bytes for kernel in row.kernels)) if row.kernels else NOTHING


def _shared_memory(row: Row) -> Iterator[str]:
    speed = next((each.speed for each in row.first if each.speed), None)
    launches = speed.launches if row.kernels and speed else ()
    yield str(max((each.dynamic_smem_bytes + each.static_smem_bytes for each in launches), default=NOTHING))


Heads = Callable[[list[str], list[str]], list[str]]  # of the shapes, and of the variants of `against`
Cells = Callable[[Row], Iterator[str]]


def _titled(head: str) -> Heads:
    return lambda _shapes, _against: [head]


def _time_heads(shapes: list[str], _against: list[str]) -> list[str]:
    return [f"device_us `{shape}`" for shape in shapes] if len(shapes) > 1 else ["device_us"]


COLUMNS: dict[str, tuple[Heads, Cells]] = {
    "variant": (_titled("variant"), _name),
    "rung": (_titled("rung"), _name),
    "measured_by": (_titled("measured by"), _name),
    "changed_lines": (_titled("changed lines"), _changed_lines),
    "lines": (_titled("lines"), _lines),
    "checks": (_titled("checks passed"), _checks),
    "expected": (_titled("expected, by the manifest"), _expected),
    "device_us": (_time_heads, _device_us),
    "call_us": (_titled("call_us"), _call_us),
    "tflops": (_titled("TFLOP/s"), _tflops),
    "ratios": (lambda _shapes, against: [f"x {name}" for name in against], _ratios),
    "omitted": (_titled("omitted phase"), _omitted),
    "saved_us": (lambda shapes, _against: [f"`{shape}`" for shape in shapes], _saved_us),
    "mma": (_titled("MMA instructions"), _mma),
    "registers": (_titled("regs"), _registers),
    "spills": (_titled("spill B"), _spills),
    "smem": (_titled("smem B"), _shared_memory),
}
