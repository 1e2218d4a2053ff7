"""Tables in Markdown files, made from committed records and kept up to date by a command.

    python -m pytest_fa.report.markdown FILE...            rewrite every table in these files
    python -m pytest_fa.report.markdown --check FILE...    1 if a table is not what the records say

A table stands between two comments; the first says what it shows:

    <!-- fa-table profiles=profiles/nvidia-h200 case=b1h8s512d64-fp16 variants=minimal,ws_p2 against=sdpa_cudnn -->
    <!-- /fa-table -->

    <!-- fa-margins profiles=profiles/nvidia-h200 variants=minimal,ws_p2 -->
    <!-- /fa-margins -->

    <!-- fa-clocks profiles=profiles/nvidia-h200 cases=b1h8s512d64-fp16 variants=ws_p2,sdpa_cudnn -->
    <!-- /fa-clocks -->

    <!-- fa-noise profiles=profiles/nvidia-h200 -->
    <!-- /fa-noise -->

    <!-- fa-verdicts profiles=profiles/nvidia-h200 case=b1h8s512d64-fp16 variants=ws_p2,sdpa_flash -->
    <!-- /fa-verdicts -->

    <!-- fa-ladder profiles=profiles/nvidia-h200 kernels=kernels cases=b1h8s512d64-fp16 against=sdpa_flash -->
    <!-- /fa-ladder -->

    <!-- fa-expectations profiles=profiles/nvidia-h200 kernels=kernels cases=b1h8s512d64-fp16 -->
    <!-- /fa-expectations -->

    <!-- fa-stages profiles=profiles/nvidia-h200 kernels=kernels of=cluster_latency cases=b1h8s512d64-fp16 -->
    <!-- /fa-stages -->

    <!-- fa-options all -->
    <!-- /fa-options -->
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pytest_fa.earlier import BLOCKS, renamed
from pytest_fa.report.blocks import MAKERS, TableProblem

BLOCK = re.compile(
    r"(<!-- fa-(?P<kind>[a-z]+) (?P<words>[^\n]*?) -->\n)(?:(?!<!-- fa-).)*?(<!-- /fa-(?P=kind) -->)", re.DOTALL
)


def rewrite(text: str, root: Path) -> str:
    """The text with every table made anew; `root` is where the comments' paths begin.

    Raises `TableProblem` for a comment that cannot be read, a table that is not closed, or records that are not there.
    """
    whole, opened = len(BLOCK.findall(text)), text.count("<!-- fa-")
    if not (whole == opened == text.count("<!-- /fa-")):
        raise TableProblem(f"{opened} tables are opened, {whole} are whole; close each on a line of its own")
    return BLOCK.sub(lambda found: f"{found[1]}\n{_made(found['kind'], found['words'], root)}\n\n{found[4]}", text)


def _made(kind: str, words: str, root: Path) -> str:
    kind = BLOCKS.get(kind, kind)
    if kind not in MAKERS:
        raise TableProblem(f"fa-{kind}: there is no such table (fa-{', fa-'.join(MAKERS)})")
    return MAKERS[kind](words, root)


def main(arguments: list[str]) -> int:
    """Rewrite or check files; 0 if all is well, 1 where a checked table is out of date, 2 for what cannot be read."""
    check, paths = "--check" in arguments, [Path(word) for word in arguments if word != "--check"]
    if not paths or any(str(path).startswith("-") for path in paths):
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    old = 0
    for path in paths:
        try:
            before = path.read_text(encoding="utf-8")
            after = rewrite(before, Path.cwd())
        except (OSError, UnicodeDecodeError, TableProblem) as problem:
            sys.stderr.write(f"{path}: {problem}\n")
            return 2
        for kind in sorted({found["kind"] for found in BLOCK.finditer(before)} & set(BLOCKS)):
            sys.stderr.write(f"{path}: {renamed(f'fa-{kind}', f'fa-{BLOCKS[kind]}')}\n")
        if check and before != after:
            sys.stderr.write(f"{path}: its tables are not what the records say\n")
            old = 1
        elif before != after:
            path.write_text(after, encoding="utf-8")
    return old


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
