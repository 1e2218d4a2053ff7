"""Writes the list of variants to the terminal, for `--fa-list`."""

from __future__ import annotations

import os

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.feature_keys import values_of
from pytest_fa.records.text import printable

LIST_WIDTH = 160  # without a terminal


def list_variants(catalog: Catalog, absence: str) -> None:
    """`--fa-list`: print every variant with its role, what it supports, and its step; problems of manifests last.

    `absence` says why no variant but the built-in ones is listed; it is empty if there are others.
    """
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("variant", no_wrap=True)
    for header in ("role", "entry", "architectures", "dtypes", "head_dim"):
        table.add_column(header)
    table.add_column("step", overflow="fold")
    for variant in catalog.variants.values():
        supports = variant.supports
        dims = "any" if supports.any_head_dim else ", ".join(map(str, supports.head_dim))
        arches = ", ".join(variant.arch) or ", ".join(supports.device)
        dtypes = ", ".join(supports.dtype)
        role = variant.role if variant.computes == "attention" else f"{variant.role} of {variant.computes}"
        table.add_row(variant.name, role, variant.entry.kind, arches, dtypes, dims, escape(printable(variant.step)))
    console = Console()
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console = Console(width=LIST_WIDTH)
    console.print(table)
    for variant in catalog.variants.values():
        for line in filter(None, (value.line(variant) for value in values_of(variant))):
            console.print(printable(line), markup=False, soft_wrap=True)
    for broken in catalog.broken.values():
        console.print(printable(f"broken: {broken.problem}"), style="red", markup=False, soft_wrap=True)
    for clash in catalog.clashes.values():
        console.print(printable(f"broken: {clash}"), style="red", markup=False, soft_wrap=True)
    if absence:
        console.print(printable(f"no variants of your own: {absence}"), style="red", markup=False, soft_wrap=True)
