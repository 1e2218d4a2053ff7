"""Counts the source of kernels: what a step changes, how long kernels are, and which lines also stand elsewhere.

python -m tools.docs.source_counts kernels
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant

LEAST_CHARACTERS = 12  # of a line that says something
_KERNEL = re.compile(r"\b__global__\b")
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
HEADS = ("rung", "parent", "changed", "lines", "longest __global__", "elsewhere %")


def changed_lines(parent: str, child: str) -> int:
    """The lines that a step adds and removes."""
    return sum(line[0] in "+-" for line in difflib.ndiff(parent.splitlines(), child.splitlines()))


def longest_kernel(source: str) -> int:
    """The lines between the braces of the longest `__global__` function; 0 if there is none."""
    code = _code_of(source)
    return max((_body_lines(code, match.end()) for match in _KERNEL.finditer(code)), default=0)


def shared_percent(name: str, sources: Mapping[str, str]) -> float:
    """The percentage of the lines of one source that also stand in another one.

    Comments, braces, includes and short lines do not count.
    """
    others = {line for other, source in sources.items() if other != name for line in _telling(source)}
    own = _telling(sources[name])
    return 100 * sum(line in others for line in own) / max(1, len(own))


def source_of(variant: Variant) -> str:
    """The CUDA source of a variant."""
    return (Path(variant.folder) / variant.entry.source).read_text(encoding="utf-8")


def counts(kernels: Path) -> list[tuple[str, ...]]:
    """A row of `HEADS` for each candidate in CUDA; `-` for a step without a source of its own."""
    variants = discover((kernels,)).variants
    rungs = {name: each for name, each in variants.items() if each.role == "candidate" and each.entry.kind == "cuda"}
    sources = {name: source_of(each) for name, each in rungs.items()}
    by_folder = {rungs[name].folder: source for name, source in sources.items()}
    rows = []
    for name, rung in rungs.items():
        parent, source = rungs.get(rung.parent or ""), sources[name]
        is_step = parent is not None and parent.folder != rung.folder
        changed = str(changed_lines(source_of(parent), source)) if parent and is_step else "-"
        figures = (len(source.splitlines()), longest_kernel(source), round(shared_percent(rung.folder, by_folder)))
        rows.append((name, rung.parent or "-", changed, *map(str, figures)))
    return rows


def main(arguments: list[str]) -> int:
    """Print the counts of a folder of kernels; return 2 after the usage on stderr if none is named."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    for row in (HEADS, *counts(Path(arguments[0]))):
        sys.stdout.write(f"{row[0]:24}{row[1]:20}" + "".join(f"{cell:>20}" for cell in row[2:]) + "\n")
    return 0


def _code_of(source: str) -> str:
    """The source without comments and texts, with as many lines."""
    return _NO_CODE.sub(lambda match: "\n" * match[0].count("\n"), source)


def _telling(source: str) -> list[str]:
    stripped = (line.strip() for line in _code_of(source).splitlines())
    return [line for line in stripped if len(line) >= LEAST_CHARACTERS and not line.startswith("#")]


def _body_lines(code: str, start: int) -> int:
    """The lines between the braces of the first body after a place; 0 for a declaration."""
    depths, opening = {"()": 0, "{}": 0}, 0
    for place in range(start, len(code)):
        character = code[place]
        for pair in depths:
            depths[pair] += (character == pair[0]) - (character == pair[1])
        if character == ";" and not opening and not depths["()"]:
            return 0
        if character == "{" and not opening and not depths["()"]:
            opening = place
        if character == "}" and opening and not depths["{}"]:
            return max(0, code.count("\n", opening, place) - 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
