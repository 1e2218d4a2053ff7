"""GitHub's annotations: one workflow command for each variant and fault, at the source or manifest of the variant."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.manifest import MANIFEST_NAME
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record

MAX_OF_A_LEVEL = 10  # GitHub shows ten errors and ten warnings of a step
MAX_CHARACTERS = 2000
MAX_IDS = 5


def annotation_lines(records: list[Record], catalog: Catalog, workspace: Path) -> list[str]:
    """The workflow commands for the failed records: at most ten errors and ten warnings.

    `workspace` is the folder of the repository, from which GitHub counts paths.
    """
    faults: dict[tuple[str, Outcome], list[Record]] = {}
    for record in records:
        if record.outcome != Outcome.OK:
            faults.setdefault((record.variant, record.outcome), []).append(record)
    lines: dict[str, list[str]] = {"error": [], "warning": []}
    for (variant, outcome), group in faults.items():
        level = "warning" if outcome == Outcome.INCONCLUSIVE else "error"
        place = _properties(group[0], catalog, workspace)
        lines[level].append(command(level, f"{variant}: {outcome.heading}", _message(group), place))
    return [line for level, of_level in lines.items() for line in _at_most(level, of_level)]


def command(level: str, title: str, message: str, properties: dict[str, str] | None = None) -> str:
    """One workflow command, with GitHub's escapes in the title, the properties and the message."""
    named = {**(properties or {}), "title": title}
    listed = ",".join(f"{name}={_escaped_property(text)}" for name, text in named.items())
    return f"::{level} {listed}::{_escaped(message[:MAX_CHARACTERS])}"


def source_of(variant: str, catalog: Catalog) -> Path | None:
    """The source of a variant, or its manifest if that cannot be read; None if the variant is not in the catalog."""
    known = catalog.variants.get(variant) or catalog.variants.get(variant.partition("@")[0])
    if known is not None:
        return _source(known)
    keys = (key for key, broken in catalog.broken.items() if broken.name == variant)
    paths = (Path(text) for key in keys for text in (key, key.rpartition(":")[0]))
    return next((path for path in paths if path.is_file()), None)


def _source(variant: Variant) -> Path:
    folder, entry = Path(variant.folder), variant.entry
    names = {
        "cuda": entry.source,
        "torch": next(iter(entry.sources), ""),
        "python": f"{entry.target.partition(':')[0].replace('.', '/')}.py",
    }
    path = folder / names.get(entry.kind, "")
    return path if path.is_file() else folder / MANIFEST_NAME


def _properties(record: Record, catalog: Catalog, workspace: Path) -> dict[str, str]:
    """`file` and `line`; nothing if the variant's files are outside of the workspace."""
    path = source_of(record.variant, catalog)
    if path is None:
        return {}
    manifest = Path(catalog.planted.get(record.variant, path.parent / MANIFEST_NAME))
    if record.outcome == Outcome.OVER_LIMIT and manifest.is_file():
        path = manifest  # the limits are there
    resolved, root = path.resolve(), workspace.resolve()
    if not resolved.is_relative_to(root):
        return {}
    return {"file": str(resolved.relative_to(root)), "line": _line(record.message, path.name)}


def _line(message: str, name: str) -> str:
    """The first line of the file that a compiler's or Python's message names; 1 if it names none."""
    match = re.search(rf"(?<![\w.-]){re.escape(name)}(?:\((\d+)\)|:(\d+))", message)
    return (match[1] or match[2]) if match else "1"


def _message(group: list[Record]) -> str:
    first = group[0]
    ids = ", ".join(record.id for record in group[1 : MAX_IDS + 1])
    more = f"\nand {len(group) - 1} more: {ids}{', ...' if len(group) > MAX_IDS + 1 else ''}" if ids else ""
    message = (
        first.message if len(first.message) <= MAX_CHARACTERS // 2 else f"{first.message[: MAX_CHARACTERS // 2]}..."
    )
    return f"{first.id}: {message}{more}\nrerun: {first.rerun_command}"


def _at_most(level: str, lines: list[str]) -> list[str]:
    """All lines, or nine of them and one that counts the others."""
    if len(lines) <= MAX_OF_A_LEVEL:
        return lines
    shown = lines[: MAX_OF_A_LEVEL - 1]
    hidden = len(lines) - len(shown)
    return [*shown, command(level, f"{hidden} more faults", "GitHub shows ten; the log and the step summary have all")]


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
