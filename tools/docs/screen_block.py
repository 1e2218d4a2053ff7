"""`fa-screen`: the table that a terminal shows for variants at some shapes, and the answer below it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from pytest_fa.features.ncu.nsight_report import NsightReport
from pytest_fa.records.ceilings import read_ceilings
from pytest_fa.table.answer import RunFacts, answer_lines
from pytest_fa.table.layout import table_lines
from pytest_fa.table.rows import make_groups
from tools.docs.block import Shown, TableProblem, names_in, read_words, records_of, some_names_in, with_origin


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of the comment; lists have commas."""

    profiles: str
    cases: str
    variants: str
    width: str


def block(words: str, root: Path) -> str:
    """The screen that the words of a comment describe.  Raises `TableProblem` for words that cannot be read."""
    spec = read_words(words, Spec)
    if not re.fullmatch(r"[1-9][0-9]{1,3}", spec.width):
        raise TableProblem(f"fa-screen: width is {spec.width!r} (allowed: 10 to 9999)")
    path, shapes = root / spec.profiles, names_in(spec.cases)
    saved = [record for name in names_in(spec.variants) for record in records_of(root, spec.profiles, name)]
    at_shapes = [record for record in saved if record.case and record.case.shape_id in shapes]
    records = [record for record in at_shapes if not NsightReport.of(record)]
    lines = table_lines(make_groups(records, read_ceilings(path.parent, path.name)), int(spec.width))
    texts = [line.text for line in (*lines, *answer_lines(records, RunFacts()))]
    return with_origin("\n".join(["```console", *texts, "```"]), records, has_checks=True)


def contents(words: str, _root: Path) -> Shown:
    """What the screen shows that was measured.  Raises `TableProblem` for words that cannot be read."""
    spec = read_words(words, Spec)
    names, shapes = some_names_in(spec.variants, "variants"), some_names_in(spec.cases, "cases")
    return Shown(spec.profiles, tuple(names), tuple(shapes), ("correct", "speed"), ("property",))
