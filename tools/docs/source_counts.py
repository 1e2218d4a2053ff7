"""Counts of the source of kernels: what a step changes, how long functions are, and what also stands elsewhere."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

LEAST_CHARACTERS = 12  # of a line that says something
_KERNEL = re.compile(r"\b__global__\b")


def changed_lines(parent: str, child: str) -> int:
    """The lines that a step adds and removes."""
    return sum(line[0] in "+-" for line in difflib.ndiff(parent.splitlines(), child.splitlines()))


def longest_kernel(source: str) -> int:
    """The lines of the longest body of a `__global__` function, without its braces; 0 if there is none."""
    return max((_body_lines(source, match.end()) for match in _KERNEL.finditer(source)), default=0)


def shared_percent(name: str, sources: Mapping[str, str]) -> float:
    """The percentage of the lines of one source that also stand in another one.

    Comments, braces, includes and short lines do not count.
    """
    others = {line for other, source in sources.items() if other != name for line in _telling(source)}
    own = _telling(sources[name])
    return 100 * sum(line in others for line in own) / max(1, len(own))


def _telling(source: str) -> list[str]:
    stripped = (re.sub(r"//.*", "", line).strip() for line in source.splitlines())
    return [line for line in stripped if len(line) >= LEAST_CHARACTERS and not line.startswith("#")]


def _body_lines(source: str, start: int) -> int:
    """The lines between the braces of the first body after a place; 0 for a declaration."""
    opening = re.compile(r"[{;]").search(source, start)
    if opening is None or opening[0] == ";":
        return 0
    depth = 0
    for place in range(opening.start(), len(source)):
        depth += (source[place] == "{") - (source[place] == "}")
        if depth == 0:
            return max(0, source.count("\n", opening.start(), place) - 1)
    return 0
