"""Generates the tables in Markdown files from committed records.

    python -m tools.docs.markdown FILE...            rewrite every table in these files
    python -m tools.docs.markdown --check FILE...    exit with 1 if a table differs from the records

A table is between two comments.  The first comment says what the table shows:

    <!-- fa-variants profiles=profiles/nvidia-h200 cases=b1h8s512d64-fp16 variants=ws_p2 columns=variant,checks -->
    <!-- /fa-variants -->

    <!-- fa-shapes profiles=profiles/nvidia-h200 cases=b1h8s4096d64-fp16 variants=ws_p2,sdpa_cudnn columns=rates -->
    <!-- /fa-shapes -->

    <!-- fa-findings of=margins profiles=profiles/nvidia-h200 variants=minimal,ws_p2 -->
    <!-- /fa-findings -->

    <!-- fa-screen profiles=profiles/nvidia-h200 cases=b1h8s512d64-fp16 variants=ws_p2,sdpa_cudnn width=120 -->
    <!-- /fa-screen -->

    <!-- fa-file profiles/nvidia-h200/noise.json -->
    <!-- /fa-file -->

    <!-- fa-regret profiles/nvidia-h200 -->
    <!-- /fa-regret -->

    <!-- fa-claims claims=profiles/claims.yaml profiles=profiles/nvidia-h200 -->
    <!-- /fa-claims -->

    <!-- fa-accuracy of=gates profiles=profiles/nvidia-h200 -->
    <!-- /fa-accuracy -->

    <!-- fa-gates profiles=profiles/nvidia-h200 variant=ws_p2 baseline=sdpa_cudnn cases=b1h8s512d64-fp16 -->
    <!-- /fa-gates -->

    <!-- fa-list options -->
    <!-- /fa-list -->

Each kind is a module, whose `Spec` names the words of its comment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pytest_fa.errors import FaError
from tools.docs import (
    accuracy_block,
    claims_block,
    file_block,
    findings_block,
    gates_block,
    list_block,
    regret_block,
    screen_block,
    shapes_block,
    variants_block,
)
from tools.docs.block import Shown, TableProblem, one_of


class BlockKind(NamedTuple):
    """Of the words of a comment and the root folder: the table, and what it shows that was measured."""

    block: Callable[[str, Path], str]
    contents: Callable[[str, Path], Shown]


class Comment(NamedTuple):
    """The comment before a table: its line in the page, its kind and its words."""

    line: int
    kind: str
    words: str

    def contents(self, root: Path) -> Shown:
        """What the table shows that was measured.  Raises `TableProblem` if the comment cannot be read."""
        return _kind_of(self.kind).contents(self.words, root)


KINDS = {
    "variants": BlockKind(variants_block.block, variants_block.contents),
    "shapes": BlockKind(shapes_block.block, shapes_block.contents),
    "findings": BlockKind(findings_block.block, findings_block.contents),
    "screen": BlockKind(screen_block.block, screen_block.contents),
    "file": BlockKind(file_block.block, file_block.contents),
    "accuracy": BlockKind(accuracy_block.block, accuracy_block.contents),
    "claims": BlockKind(claims_block.block, claims_block.contents),
    "gates": BlockKind(gates_block.block, gates_block.contents),
    "list": BlockKind(list_block.block, list_block.contents),
    "regret": BlockKind(regret_block.block, regret_block.contents),
}

BLOCK = re.compile(
    r"(<!-- fa-(?P<kind>[a-z]+) (?P<words>[^\n]*?) -->\n)(?:(?!<!-- fa-).)*?(<!-- /fa-(?P=kind) -->)", re.DOTALL
)


def rewrite(text: str, root: Path) -> str:
    """The text with every table generated again.  Paths in the comments are relative to `root`.

    Raises `TableProblem` for a comment that cannot be read, a table that is not closed, or records that do not exist,
    and `UnreadableRecords` for a record file with a line that is no record.
    """
    require_closed(text)
    return BLOCK.sub(lambda block: f"{block[1]}\n{_table_of(block['kind'], block['words'], root)}\n\n{block[4]}", text)


def comments_of(text: str) -> list[Comment]:
    """The comments of a page before its tables.  Raises `TableProblem` for a table that is not closed."""
    require_closed(text)
    blocks = BLOCK.finditer(text)
    return [Comment(text.count("\n", 0, block.start()) + 1, block["kind"], block["words"]) for block in blocks]


def require_closed(text: str) -> None:
    """Raise `TableProblem` if a table of a page is not closed."""
    closed, opened = len(BLOCK.findall(text)), text.count("<!-- fa-")
    if not (closed == opened == text.count("<!-- /fa-")):
        raise TableProblem(f"{opened} tables are opened, {closed} of them are closed; close each on its own line")


def _table_of(kind: str, words: str, root: Path) -> str:
    return _kind_of(kind).block(words, root)


def _kind_of(kind: str) -> BlockKind:
    return one_of(kind, KINDS, "the kind of a table, fa-<kind>,")


def main(arguments: list[str]) -> int:
    """Rewrite or check files.

    Returns 0 on success, 1 if a checked table is out of date, 2 if a file or a table cannot be read.
    """
    check, paths = "--check" in arguments, [Path(word) for word in arguments if word != "--check"]
    if not paths or any(str(path).startswith("-") for path in paths):
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    status = 0
    for path in paths:
        try:
            before = path.read_text(encoding="utf-8")
            after = rewrite(before, Path.cwd())
        except (OSError, UnicodeDecodeError, FaError) as problem:
            sys.stderr.write(f"{path}: {problem}\n")
            return 2
        if check and before != after:
            sys.stderr.write(f"{path}: its tables differ from the records; rerun without --check to rewrite them\n")
            status = 1
        elif before != after:
            path.write_text(after, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
