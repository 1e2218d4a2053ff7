"""The tables of the pages that show what was measured, and the saved results of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import COMPANION_ROLES, Variant
from pytest_fa.errors import FaError
from pytest_fa.features.ncu.plugin import SETS
from pytest_fa.records.files import BadLine, read_record_file
from pytest_fa.records.log import saved_name
from pytest_fa.records.record import JUDGED_KINDS, Record, RecordKind
from pytest_fa.records.standing import rank_of, standing_results
from tools.docs.block import SEED, Shown, ShownGate, TableProblem, is_failure, newest_gate
from tools.docs.markdown import comments_of
from tools.measure.machine_code import SameCode
from tools.measure.sources import SourceHistory

PAGES = ("README.md", "docs/**/*.md", "kernels/*.md")


class ShownResult(NamedTuple):
    """A result that a table shows: the kind and the id of its record, and where it was measured."""

    kind: RecordKind
    id: str
    variant: str
    shape: str  # of a gate, its shapes with commas
    gate: ShownGate | None = None

    def __str__(self) -> str:
        against = f" against {self.gate.baseline}" if self.gate else ""
        return f"{self.kind} of {self.variant}{against} at {self.shape}"


class PageTable(NamedTuple):
    """A table of a page, and the record of each result that it shows; None if there is none.

    `earlier` are the results whose only record has an earlier schema.  `files` are paths from the root folder.
    """

    page: str
    line: int
    folder: str
    records: dict[ShownResult, Record | None]
    earlier: frozenset[ShownResult] = frozenset()
    files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Where the table is, such as `kernels/long.md:6`."""
        return f"{self.page}:{self.line}"


class ShownPages:
    """The pages of a repository with what their tables need: the variants, and the saved results that stand.

    With `chosen`, paths from the root folder or names of tables such as `kernels/long.md:6`, it has these tables, and
    those that share a result with one.  With `same_code`, sources have not changed for a variant with the same code.
    Raises `TableProblem` if there are no pages or not the chosen ones, and `FaError` if the variants cannot be read.
    """

    def __init__(
        self, root: Path, kernels: str = "kernels", chosen: Sequence[str] = (), same_code: SameCode | None = None
    ) -> None:
        self.root, self._chosen, self._same_code = root, frozenset(chosen), same_code
        self._paths = [path for glob in PAGES for path in sorted(root.glob(glob))]
        if not self._paths:
            raise TableProblem(f"no page in {root}: run this in the root folder of the repository")
        pages = {_name_of(path, root) for path in self._paths}
        if unknown := [name for name in sorted(self._chosen) if _page_of(name) not in pages]:
            raise TableProblem(f"no page is {unknown[0]!r}; write the path from {root}, such as kernels/long.md")
        catalog = discover((root / kernels,))
        catalog.require_unique_names()
        self.variants: dict[str, Variant] = catalog.variants
        self._saved: dict[tuple[str, str], tuple[list[Record], list[BadLine]]] = {}

    def tables(self) -> list[PageTable]:
        """The tables that show something measured.

        Raises `TableProblem` for a page, a comment or a line of records that cannot be read, for a variant that does
        not exist, and if a chosen page or line has no such table.
        """
        tables = [table for path in self._paths for table in self._tables_of(path)]
        if not self._chosen:
            return tables
        if without := sorted(self._chosen - {name for table in tables for name in (table.page, table.name)}):
            lines = [str(table.line) for table in tables if table.page == _page_of(without[0])]
            more = f"; the page has some at the lines {', '.join(lines)}" if lines else ""
            raise TableProblem(f"{without[0]} has no table of measured results{more}")
        groups = [
            group for group in groups_of(tables) if any({table.page, table.name} & self._chosen for table in group)
        ]
        names = {each.name for group in groups for each in group}
        return [each for each in tables if each.name in names]

    def read_again(self) -> ShownPages:
        """The same pages with what is saved now."""
        return ShownPages(self.root, chosen=[*self._chosen], same_code=self._same_code)

    def history(self) -> SourceHistory:
        """Which sources changed since a record was made."""
        return SourceHistory(self.root, self._same_code)

    def _tables_of(self, path: Path) -> Iterator[PageTable]:
        page = _name_of(path, self.root)
        try:
            for comment in comments_of(path.read_text(encoding="utf-8")):
                shown = comment.contents(self.root)
                if shown.variants or shown.files or shown.gates:
                    yield self._table(page, comment.line, shown)
        except (OSError, UnicodeDecodeError, FaError) as problem:
            raise TableProblem(f"{page}: {problem}") from None

    def _table(self, page: str, line: int, shown: Shown) -> PageTable:
        records: dict[ShownResult, Record | None] = dict.fromkeys(self._expected(shown))
        earlier: set[ShownResult] = set()
        for variant in shown.variants:
            standing, bad_lines = self._saved_of(shown.profiles, variant)
            for record in sorted(standing, key=rank_of, reverse=True):  # an answer replaces a result without a verdict
                if record.case and shown.shows(variant, record.case.shape_id) and _is_shown(record, shown):
                    records[ShownResult(record.kind, record.id, variant, record.case.shape_id)] = record
            keys = {bad_line.earlier_key for bad_line in bad_lines}
            earlier |= {each for each in records if each.variant == variant and (each.kind, each.id) in keys}
        for gate in shown.gates:
            self._require_variant(gate.variant)
            self._require_variant(gate.baseline)
            standing, _ = self._saved_of(shown.profiles, gate.variant)
            result = ShownResult("gate", gate.variant, gate.variant, ",".join(gate.shapes), gate)
            records[result] = newest_gate(gate, standing)
        missing = frozenset(each for each in earlier if records[each] is None)
        files = tuple(f"{shown.profiles}/{name}" for name in shown.files)
        return PageTable(page, line, shown.profiles, records, missing, files)

    def _expected(self, shown: Shown) -> Iterator[ShownResult]:
        """What the table would show if all was measured that its variants support."""
        for name in shown.variants:
            variant = self._require_variant(name)
            for shape in (each for each in shown.shapes if shown.shows(name, each)):
                case = parse_case(f"{shape}-{SEED}")
                kinds = [kind for kind in shown.kinds if kind != "correct" or _has_checks_of_its_own(variant)]
                if variant.refuses(case) is None:
                    yield from (ShownResult(kind, _id_of(kind, name, case), name, shape) for kind in kinds)

    def _require_variant(self, name: str) -> Variant:
        if name not in self.variants:
            raise TableProblem(f"there is no variant {name}")
        return self.variants[name]

    def _saved_of(self, profiles: str, variant: str) -> tuple[list[Record], list[BadLine]]:
        """The results of a variant that stand, and its lines of an earlier schema."""
        if (profiles, variant) not in self._saved:
            path = self.root / profiles / saved_name(variant)
            file = read_record_file(path)
            if file.problem or any(not each.earlier_key for each in file.bad_lines):
                raise TableProblem(f"{path}: {file.complaint}")
            self._saved[profiles, variant] = list(standing_results(file.records).records), list(file.bad_lines)
        return self._saved[profiles, variant]


def _name_of(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _page_of(chosen: str) -> str:
    """The page of a table's name, or the page itself."""
    page, _, line = chosen.rpartition(":")
    return page if line.isdigit() else chosen


def _id_of(kind: RecordKind, variant: str, case: Case) -> str:
    """The id of a record; a profile's ends with the set of its counters."""
    return f"{variant}-{case.id}{f'-{SETS[0]}' if kind == 'profile' else ''}"


def _has_checks_of_its_own(variant: Variant) -> bool:
    """Whether `test_correct` runs it; of others, only the outputs of timed calls are judged."""
    return variant.is_judged and variant.role not in COMPANION_ROLES


def _is_shown(record: Record, shown: Shown) -> bool:
    shows_judged = any(kind in JUDGED_KINDS for kind in (*shown.kinds, *shown.kinds_if_saved))
    return record.kind in (*shown.kinds, *shown.kinds_if_saved) or (shows_judged and is_failure(record))


def groups_of(tables: Sequence[PageTable]) -> list[list[PageTable]]:
    """The tables in groups: those that show a result together are in one, since they show one record of it."""
    groups: list[list[PageTable]] = []
    for table in tables:
        touching = [group for group in groups if any(table.records.keys() & each.records.keys() for each in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([*(each for group in touching for each in group), table])
    return groups
