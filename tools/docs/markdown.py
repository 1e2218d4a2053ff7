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

    <!-- fa-list options -->
    <!-- /fa-list -->

Each kind is a module, whose `Spec` names the words of its comment.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pytest_fa.errors import FaError
from tools.docs import file_block, findings_block, list_block, regret_block, screen_block, shapes_block, variants_block
from tools.docs.block import TableProblem, one_of

KINDS = {
    "variants": variants_block.block,
    "shapes": shapes_block.block,
    "findings": findings_block.block,
    "screen": screen_block.block,
    "file": file_block.block,
    "list": list_block.block,
    "regret": regret_block.block,
}

BLOCK = re.compile(
    r"(<!-- fa-(?P<kind>[a-z]+) (?P<words>[^\n]*?) -->\n)(?:(?!<!-- fa-).)*?(<!-- /fa-(?P=kind) -->)", re.DOTALL
)


def rewrite(text: str, root: Path) -> str:
    """The text with every table generated again.  Paths in the comments are relative to `root`.

    Raises `TableProblem` for a comment that cannot be read, a table that is not closed, or records that do not exist,
    and `UnreadableRecords` for a record file with a line that is no record.
    """
    closed, opened = len(BLOCK.findall(text)), text.count("<!-- fa-")
    if not (closed == opened == text.count("<!-- /fa-")):
        raise TableProblem(f"{opened} tables are opened, {closed} of them are closed; close each on its own line")
    return BLOCK.sub(lambda block: f"{block[1]}\n{_table_of(block['kind'], block['words'], root)}\n\n{block[4]}", text)


def _table_of(kind: str, words: str, root: Path) -> str:
    return one_of(kind, KINDS, "the kind of a table, fa-<kind>,")(words, root)


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
