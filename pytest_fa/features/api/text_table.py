"""A table as text, as a Python prompt shows it."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def text_table(headers: Iterable[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table, as wide as its cells need."""
    table = Table(*headers, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(file=io.StringIO(), width=10_000)
    console.width = console.measure(table).maximum
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]
