"""`--fa-static`: the tables of resources and of instructions, and the lines below them."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pytest_fa.records.built import stable_name
from pytest_fa.records.record import Record
from pytest_fa.table.static_code import GROUPS, Launches, difference_lines, fit_lines, mix, resource_cells

HEADERS = (
    "variant",
    "arch",
    "kernel",
    "regs",
    "spill B",
    "stack B",
    "smem B",
    "threads",
    "blocks/SM",
    "warps",
    "SASS B",
)
FOOTNOTE = (
    "threads: block size of the launch in a saved record, otherwise __launch_bounds__ of the source.\n"
    "smem B: static shared memory; with '+', the dynamic shared memory of the launch in a saved record is included.\n"
    "blocks/SM: number of blocks that fit on an SM, and the resource that limits it.  warps: occupancy in percent.\n"
    "'<=': upper bound, because the dynamic shared memory is not known."
)


def static_text(records: list[Record], launches: Launches, width: int) -> str:
    """The table of resources, the table of instructions by group, and the difference if there are two variants."""
    builds = [build for record in records if record.kind == "build" for build in record.builds]
    if not builds:
        return ""
    resources = Table(*HEADERS, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    instructions = Table(
        "variant", "arch", "kernel", *GROUPS, "other", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for build in builds:
        for kernel in build.kernels:
            launch = launches.get((build.variant, stable_name(kernel.name)))
            name = escape(kernel.name)  # rich would take a part in brackets as a style
            resources.add_row(build.variant, build.arch, name, *resource_cells(build, kernel, launch))
            instructions.add_row(build.variant, build.arch, name, *map(str, mix(kernel).values()))
    tables = [_rendered(table, width) for table in (resources, instructions)]
    return "\n".join([*tables, FOOTNOTE, *fit_lines(builds, launches), *difference_lines(builds)])


def _rendered(table: Table, width: int) -> str:
    """A table as text.  It is wider than the terminal if its cells need more space."""
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None)
    console.width = max(width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())
