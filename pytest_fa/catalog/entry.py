"""Check that the keys of a manifest's `entry` are consistent; each problem is one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from pytest_fa.attention import parts
from pytest_fa.attention.backward import ALL_GRADIENTS, ARGUMENTS, DLSE, DOUT, LINE
from pytest_fa.attention.backward import PART as BACKWARD
from pytest_fa.attention.layout import passed_within
from pytest_fa.attention.not_judged import recognised
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.grammar import path_problem, real_path_problem
from pytest_fa.catalog.variant import Entry, EntryKind, Supports

FUNCTION, IN_A_MODULE = r"[\w.]+:\w+", "'package.module:function'"
# The forms of `target`, and examples.
FORMS: dict[EntryKind, str] = {"python": rf"{FUNCTION}|\w+::\w+", "torch": r"\w+(::\w+)?"}
EXAMPLES: dict[EntryKind, str] = {
    "python": f"{IN_A_MODULE} or 'namespace::operator'",
    "torch": "'function' or 'namespace::operator'",
}
# The kinds that a key is allowed for; keys that are not listed are allowed for all kinds.
KINDS_OF: dict[str, tuple[EntryKind, ...]] = {
    "target": ("torch", "python"),
    "context": ("python",),
    "sources": ("torch",),
    "include": ("cuda", "torch"),
    "cflags": ("torch",),
    "ldflags": ("torch",),
    "libraries": ("python",),
    "call": ("torch", "python"),
    "autograd": ("torch", "python"),
}
SOURCE_SUFFIXES = (".cu", ".cpp", ".cc", ".cxx", ".c")


def entry_problem(entry: Entry, supports: Supports, folder: Path, computes: Computes = "attention") -> str | None:
    """Return the first problem (the key, the value found and what is allowed), or None."""
    return next(_problems(entry, supports, folder, computes), None)


def _problems(entry: Entry, supports: Supports, folder: Path, computes: Computes) -> Iterator[str]:
    for key, kinds in KINDS_OF.items():
        if getattr(entry, key) and entry.kind not in kinds:
            yield f"entry.{key} is only for kind {' or '.join(kinds)}; this entry's kind is {entry.kind}"
    yield from _source_problems(entry, folder)
    for key in ("target", "context") if entry.kind in FORMS else ():
        value = getattr(entry, key)
        form, example = (FORMS[entry.kind], EXAMPLES[entry.kind]) if key == "target" else (FUNCTION, IN_A_MODULE)
        if not re.fullmatch(form, value, re.ASCII) and (value or key == "target"):
            yield f"entry.{key} is {value!r}; for kind {entry.kind}, the form is {example}"
        module, _, name = value.partition(":")
        if entry.kind == "python" and module.endswith(".py"):
            yield f"entry.{key} is {value!r}, but a module has no .py; write `{module.removesuffix('.py')}:{name}`"
    if entry.autograd and computes != "gradients":
        yield f"entry.autograd is true, but computes is {computes!r}; write `computes: gradients`, or drop autograd"
    if entry.autograd and BACKWARD.is_claimed(supports):
        yield "supports.dlse is true, but entry.autograd is true: autograd gets that of the output alone; drop dlse"
    yield from _library_problems(entry)
    yield from _call_problems(entry, supports, computes)
    yield from _interface_problems(entry, supports)


def _library_problems(entry: Entry) -> Iterator[str]:
    if entry.libraries and not entry.is_operator:
        yield f"entry.libraries is for an operator, but entry.target is {entry.target!r}; write 'namespace::operator'"
    yield from filter(None, (path_problem("entry.libraries has", each, of_extension=True) for each in entry.libraries))


def _source_problems(entry: Entry, folder: Path) -> Iterator[str]:
    sources = {"cuda": [entry.source], "torch": list(entry.sources)}.get(entry.kind, [])
    if entry.kind == "torch" and not sources:
        yield "entry.sources is missing; kind torch needs a list of source files"
    key = "entry.source is" if entry.kind == "cuda" else "entry.sources has"
    for source in sources:
        yield from _path_problems(entry, key, folder, source)
        if not (folder / source).is_file():
            yield f"{key} {source!r}; that file does not exist{_other_source(entry, folder)}"
        if entry.kind == "torch" and Path(source).suffix not in SOURCE_SUFFIXES:
            yield f"entry.sources has {source!r}; a source file ends with {', '.join(SOURCE_SUFFIXES)}"
    objects = [Path(source).with_suffix("") for source in sources]
    clashing = [source for source in sources if objects.count(Path(source).with_suffix("")) > 1]
    if entry.kind == "torch" and clashing:
        yield f"entry.sources has {', '.join(clashing)}, which compile to one object file; rename one of them"
    for include in entry.include:
        yield from _path_problems(entry, "entry.include has", folder, include, is_linked=entry.kind == "cuda")
        if not (folder / include).is_dir():
            yield f"entry.include has {include!r}; there is no folder {os.path.normpath(folder / include)}"


def _other_source(entry: Entry, folder: Path) -> str:
    """What to write in the manifest if the variant's folder has one other source; empty if it has none or several."""
    names = sorted(path.name for path in folder.glob("*.cu")) or sorted(path.name for path in folder.glob("*.py"))
    if entry.kind != "cuda" or len(names) != 1:
        return ""
    name = names[0].removesuffix(".py")
    line = f"source: {name}" if name.endswith(".cu") else f'target: "{name}:FUNCTION"'
    return f"; for {names[0]} write `entry: {{{line}}}`"


def _path_problems(entry: Entry, key: str, folder: Path, path: str, *, is_linked: bool = False) -> Iterator[str]:
    """The form of a path as it is written; for an extension, whose build gets the real path, also the form of that.

    If the build gets only a link to the path, it may be absolute and may have spaces, as for an extension.
    """
    of_extension = entry.kind == "torch"
    for problem in (
        path_problem(key, path, of_extension=of_extension or is_linked),
        real_path_problem(key, folder / path) if of_extension else None,
    ):
        if problem:
            yield problem


def _interface_problems(entry: Entry, supports: Supports) -> Iterator[str]:
    """A kernel without Python gets only what the C interface has."""
    for part in parts.claimed_parts() if entry.kind == "cuda" else ():
        claims = part.supported(supports)
        if not part.is_in_c_interface and claims != part.claims[:1]:
            listed = part.shown_claims(supports)
            yield (
                f"supports.{part.supports} is {listed}, but the C interface has no field for it; drop the key, or call "
                f"the kernel from a function of Python (entry.target)"
            )


def _needed_words(entry: Entry, computes: Computes) -> tuple[str, ...]:
    """The tensors that each call must pass."""
    if computes == "scores":
        return ("q", "k")
    return tuple(ARGUMENTS) if computes == "gradients" and not entry.autograd else ("q", "k", "v")


def _call_problems(entry: Entry, supports: Supports, computes: Computes) -> Iterator[str]:
    """A call must pass every tensor that is read, and what each part of attention needs."""
    call = entry.call
    if call is None:
        return
    for word in _needed_words(entry, computes):
        if not any(map(call.passes, (word, *passed_within(word)))):
            known = ((name, recognised(name)) for name in call.keywords)
            answers = (f"; {name}: {row.advice_for(name, f'`{name}: {{}}`')}" for name, row in known if row)
            yield f"entry.call does not pass {word!r}; add it to arguments or keywords{next(answers, '')}"
    if call.place_of("out") is not None and call.passes("out") and (computes != "gradients" or entry.autograd):
        yield "entry.call passes 'out' and sets returns; use only one of the two"
    for word in (DOUT, DLSE, *ALL_GRADIENTS) if computes != "gradients" or entry.autograd else ():
        if call.passes(word) or call.place_of(word) is not None:
            change = "drop it, or drop autograd" if entry.autograd else f"write {LINE}"
            yield f"entry.call has {word!r}, which is for a backward function; {change}"
    yield from filter(None, (part.call_problem(call, supports) for part in parts.PARTS))
