"""Where a kernel's warps stood when they were sampled, by stage of attention: an estimate from source lines, no time.

The ladder's kernels are written in the same paragraphs under the same words (`// S = Q K^T`, `// O += P V`); a sample
belongs to the paragraph of its line.  What stands in another file, inlined, belongs to the paragraph of the instruction
before it; a warp that waits at a barrier waits for a barrier wherever that stands.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from pytest_fa.records.tool_results import SourceLine

BARRIERS, OTHER = "barriers", "other"
MOST_LINES = 10

# A comment that begins a paragraph, and the stage that it is of.
_PARAGRAPHS: tuple[tuple[str, str], ...] = (
    (r"S = Q|Q ?K\^?T|Q\.K", "Q.K^T"),
    (r"O \+= ?P|P ?V\b|P\.V", "P.V"),
    (r"\b[Ww]ait|[Bb]arrier|nobody|arrive", BARRIERS),
    (r"mask|row max|rescale|P = exp|row sum|softmax|[Nn]ormali[sz]e", "softmax"),
    (r"[Ll]oad|[Cc]opy|[Cc]opies|[Ss]tore|prefetch", "I/O"),
)
# What a line itself says, whatever its paragraph.
_LINES: tuple[tuple[str, str], ...] = (
    (r"__syncthreads|__syncwarp|barrier_sync|sync_\w+\(|\bwait\w*\(|mbarrier_\w*wait|mbarrier_arrive", BARRIERS),
    (r"\w*exp2?f?\(|(max|sum)_of_row|fmaxf", "softmax"),
)
_FUNCTION = re.compile(r"^(template|__device__|__global__|static|inline|FA_EXPORT|\w+ \w+\()")


def phases_of_source(text: str) -> dict[int, str]:
    """The stage of every line, counted from 1.  A function without a word above it is `other`."""
    found: dict[int, str] = {}
    phase, said_at = OTHER, 0
    for number, line in enumerate(text.splitlines(), start=1):
        _, mark, comment = line.partition("//")
        if mark and line.strip().startswith("//"):
            said = _first(_PARAGRAPHS, comment)
            phase, said_at = (said, number) if said else (phase, said_at)
        elif _FUNCTION.match(line) and said_at < number - 2:
            phase = OTHER
        found[number] = _first(_LINES, line.partition("//")[0]) or phase
    return found


def phase_samples(lines: tuple[SourceLine, ...], source_name: str, source: str) -> dict[str, int]:
    """Samples by stage, most first; `lines` come in the order of their instructions."""
    phases = phases_of_source(source)
    found: Counter[str] = Counter()
    last = OTHER
    for each in lines:
        if Path(each.file).name == source_name:
            last = phases.get(each.line, OTHER)
        found[each.phase or last] += each.samples
    return dict(found.most_common())


def busiest_lines(lines: tuple[SourceLine, ...]) -> tuple[SourceLine, ...]:
    """The lines on which most samples fell, whatever the warps waited for."""
    found: Counter[tuple[str, int]] = Counter()
    for each in lines:
        found[(Path(each.file).name, each.line)] += each.samples
    return tuple(SourceLine(file, line, samples, "") for (file, line), samples in found.most_common(MOST_LINES))


def _first(rules: tuple[tuple[str, str], ...], text: str) -> str:
    return next((phase for sign, phase in rules if re.search(sign, text)), "")
