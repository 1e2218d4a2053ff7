"""What one compilation makes: a `Unit`.  Variants that share a library are compiled once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pytest_fa.build import recipe
from pytest_fa.build.outcomes import BuildFailure, BuildOutcome
from pytest_fa.build.toolchain import Toolchain
from pytest_fa.catalog.variant import Target, Variant

Say = Callable[[str], None]
Request = tuple[Variant, Target]
Outcomes = dict[tuple[str, str], BuildOutcome]


class Unit(NamedTuple):
    """One compilation: the variants that share its library, and what it is compiled for and with."""

    variants: tuple[Variant, ...]
    arch: Target
    toolchain: Toolchain

    @property
    def first(self) -> Variant:
        """The variant by whose manifest it is compiled; the others have the same sources, flags and definitions."""
        return self.variants[0]

    @property
    def title(self) -> str:
        """Its variants and its architecture: `forward/host`, or `forward + forward_lse/host` if they share a build."""
        return f"{' + '.join(variant.name for variant in self.variants)}/{self.arch}"

    def failure(self, reason: str, command: str = "") -> Outcomes:
        """The failure of each variant; `reason` may be a compiler's text."""
        names = tuple(variant.name for variant in self.variants)
        reason = with_own_paths(reason, Path(self.first.root, self.first.folder))
        return {(name, self.arch): BuildFailure(name, self.arch, reason, command, shared_by=names) for name in names}


def with_own_paths(text: str, folder: Path) -> str:
    """A compiler's text with the paths and lines of the user's files, relative to the working folder.

    It compiles a link to the variant's `folder`: `src/kernel.cu(16)` becomes `kernels/mine/kernel.cu:16`, to which an
    editor can jump.
    """

    def own(match: re.Match[str]) -> str:
        path = folder / match["file"]
        line = f":{match['line']}" if match["line"] else ""
        return f"{os.path.relpath(path)}{line}" if path.is_file() else match[0]

    return re.sub(r"(?<![\w./-])src/(?P<file>[^\s():\"\']+)(?:\((?P<line>\d+)\))?", own, text)


def units_of(requests: list[tuple[Request, Toolchain]]) -> list[Unit]:
    """Return the compilations that the requests need, in their order."""
    units: dict[tuple[str, ...], Unit] = {}
    for (variant, arch), toolchain in requests:
        key = (variant.folder, variant.root, variant.entry.kind, arch, recipe.request_key(variant, arch))
        unit = units.get(key, Unit((), arch, toolchain))
        units[key] = unit._replace(variants=(*unit.variants, variant))
    return list(units.values())
