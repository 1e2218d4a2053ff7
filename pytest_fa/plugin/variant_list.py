"""Writes the list of variants to the terminal, for `--fa-list`: a line for each, or some of them whole."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from rich.console import Console

from pytest_fa.attention import parts
from pytest_fa.attention.backward import PART as BACKWARD
from pytest_fa.attention.part import Part
from pytest_fa.attention.sizes import is_range, shown_sizes
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.feature_keys import values_of
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.records.text import printable

LIST_WIDTH = 160  # without a terminal
HEAD = ("variant", "role", "entry", "dtypes", "head_dim", "step")
MAX_WIDTHS = (40, 9, 6, 9, 8, 0)  # of the columns; a longer value moves the rest of its line
CUT = "..."
INDENT = 15  # of the values of a variant that is shown whole
HINT = "--fa-list=NAME shows one whole"


def list_variants(catalog: Catalog, absence: str) -> None:
    """`--fa-list`: print a line for every variant, cut at the width of the terminal; problems of manifests last.

    `absence` says why no variant but the built-in ones is listed; it is empty if there are others.
    """
    console, width = Console(highlight=False, markup=False, soft_wrap=True), _width()
    variants = catalog.variants.values()
    for line in _table([HEAD, *map(_row, variants)]):
        console.print(line if len(line) <= width else line[: max(0, width - len(CUT))] + CUT)
    console.print()
    for variant in variants:
        for line in _feature_lines(variant):
            console.print(line)
    console.print(HINT)
    for broken in catalog.broken.values():
        console.print(printable(f"broken: {broken.problem}"), style="red")
    for clash in catalog.clashes.values():
        console.print(printable(f"broken: {clash}"), style="red")
    if absence:
        console.print(printable(f"no variants of your own: {absence}"), style="red")


def show_variants(catalog: Catalog, patterns: tuple[str, ...]) -> None:
    """`--fa-list=NAME`: print all that the manifests of these variants say; `patterns` are names and globs.

    Raises `UsageProblem` for a pattern that matches nothing.
    """
    console, width = Console(highlight=False, markup=False, soft_wrap=True), _width()
    for index, variant in enumerate(select_variants(catalog, patterns, flag="--fa-list")):
        if index:
            console.print()
        if isinstance(variant, BrokenVariant):
            console.print(printable(f"broken: {variant.problem}"), style="red")
            continue
        for name, value in _facts(variant):
            text = printable(f"{name}:".ljust(INDENT) + value)
            console.print(textwrap.fill(text, width, subsequent_indent=" " * INDENT, break_long_words=False))
        for line in _feature_lines(variant):
            console.print(line)


def _width() -> int:
    return shutil.get_terminal_size((LIST_WIDTH, 24)).columns


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The rows with two spaces between their columns."""
    columns = zip(zip(*rows, strict=True), MAX_WIDTHS, strict=True)
    widths = [min(max(map(len, column)), max_width) for column, max_width in columns]
    for row in rows:
        yield "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()


def _row(variant: Variant) -> tuple[str, ...]:
    supports = variant.supports
    sizes = supports.head_dim
    listed = f"{min(sizes)} to {max(sizes)}" if is_range(sizes) else ",".join(map(str, sizes))
    dims = "any" if supports.any_head_dim else listed
    step = " ".join(printable(variant.step).split())
    return (variant.name, _role(variant), variant.entry.kind, ",".join(supports.dtype), dims, step)


def _role(variant: Variant) -> str:
    return variant.role if variant.computes == "attention" else f"{variant.role} of {variant.computes}"


def _claimed_parts(variant: Variant) -> list[Part]:
    """The parts that the variant may claim."""
    return [part for part in parts.claimed_parts() if part is not BACKWARD or variant.computes == "gradients"]


def _facts(variant: Variant) -> Iterator[tuple[str, str]]:
    """What the manifest says, without what is empty."""
    entry, supports = variant.entry, variant.supports
    facts = {
        "variant": variant.name,
        "folder": variant.folder,
        "role": _role(variant),
        "parent": variant.parent or "",
        "entry": f"{entry.kind}, {entry.source if entry.kind == 'cuda' else entry.target}",
        "architectures": ", ".join(variant.arch),
        "devices": ", ".join(supports.device),
        "dtypes": ", ".join(supports.dtype),
        "head_dim": "any" if supports.any_head_dim else shown_sizes(supports.head_dim),
        **{part.supports: part.shown_claims(supports) for part in _claimed_parts(variant)},
        "defines": ", ".join(f"{name}={value}" for name, value in variant.defines.items()),
        "flags": " ".join(variant.flags),
        "tolerance": str(variant.tolerance),
        "conventions": ", ".join(f"{key}: {value}" for key, value in variant.conventions.items()),
        "step": variant.step,
        "because": variant.because,
        "expect": variant.expect,
    }
    return ((name, " ".join(value.split())) for name, value in facts.items() if value)


def _feature_lines(variant: Variant) -> list[str]:
    return [printable(line) for value in values_of(variant) if (line := value.line(variant))]
