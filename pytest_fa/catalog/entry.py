"""What does not go together in a manifest's `entry`, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.variant import Entry, EntryKind, Supports

FORMS: dict[EntryKind, str] = {"python": r"[\w.]+:\w+", "torch": r"\w+(::\w+)?"}
EXAMPLES: dict[EntryKind, str] = {"python": "'package.module:function'", "torch": "'function' or 'namespace::operator'"}
# Keys that only some kinds have.
KINDS_OF: dict[str, tuple[EntryKind, ...]] = {
    "target": ("torch", "python"),
    "context": ("python",),
    "sources": ("torch",),
    "include": ("torch",),
    "cflags": ("torch",),
    "ldflags": ("torch",),
    "call": ("torch", "python"),
}
SOURCE_SUFFIXES = (".cu", ".cpp", ".cc", ".cxx", ".c")


def entry_problem(entry: Entry, supports: Supports, folder: Path, computes: Computes = "attention") -> str | None:
    """The first thing that is wrong: the key, the value found, what is allowed.  None where all is well."""
    return next(_problems(entry, supports, folder, computes), None)


def _problems(entry: Entry, supports: Supports, folder: Path, computes: Computes) -> Iterator[str]:
    for key, kinds in KINDS_OF.items():
        if getattr(entry, key) and entry.kind not in kinds:
            yield f"entry.{key} is for kind {' or '.join(kinds)}, this one is {entry.kind}"
    yield from _source_problems(entry, folder)
    for key in ("target", "context") if entry.kind in FORMS else ():
        value = getattr(entry, key)
        if not re.fullmatch(FORMS[entry.kind], value) and (value or key == "target"):
            yield f"entry.{key} is {value!r}; a {entry.kind} entry's is {EXAMPLES[entry.kind]}"
    yield from _call_problems(entry, supports, computes)


def _source_problems(entry: Entry, folder: Path) -> Iterator[str]:
    named = {"cuda": [entry.source], "torch": list(entry.sources)}.get(entry.kind, [])
    if entry.kind == "torch" and not named:
        yield "entry.sources is missing; a torch entry names its source files"
    for each in named:
        if not (folder / each).is_file():
            yield f"entry.{'source' if entry.kind == 'cuda' else 'sources'} is {each!r}, and there is no such file"
        if entry.kind == "torch" and Path(each).suffix not in SOURCE_SUFFIXES:
            yield f"entry.sources has {each!r}; a source ends with {', '.join(SOURCE_SUFFIXES)}"
    twins = [
        each for each in named if [Path(one).with_suffix("") for one in named].count(Path(each).with_suffix("")) > 1
    ]
    if entry.kind == "torch" and twins:
        yield f"entry.sources has {', '.join(twins)}, which make one object file; give each a name of its own"
    for each in entry.include:
        if not (folder / each).is_dir():
            yield f"entry.include is {each!r}, and there is no such folder"


def _call_problems(entry: Entry, supports: Supports, computes: Computes) -> Iterator[str]:
    """A call says enough: every tensor that is read, and the mask wherever there is a choice of one."""
    call = entry.call
    if call is None:
        return
    for word in ("q", "k") if computes == "scores" else ("q", "k", "v"):
        if not call.passes(word):
            yield f"entry.call does not pass {word!r}"
    if call.returns is not None and call.passes("out"):
        yield "entry.call passes 'out' and has returns; the output is the one or the other"
    if call.contiguous and call.layout not in supports.layout:
        yield f"entry.call takes contiguous {call.layout} tensors, and supports.layout is {', '.join(supports.layout)}"
    masks = ", ".join(supports.causal)
    if not call.passes("causal") and len(supports.causal) > 1:
        yield f"entry.call does not pass 'causal', and supports.causal is {masks}"
    if call.passes("causal") and {"top_left", "bottom_right"} <= set(supports.causal):
        yield f"entry.call passes 'causal' as true or false, and supports.causal is {masks}: name one alignment"
