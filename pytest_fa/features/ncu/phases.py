"""Assigns stall samples to the phases of attention by source line.  This is an estimate and not a time.

The kernels of the ladder consist of paragraphs that begin with the same comments (`// S = Q K^T`, `// O += P V`).  A
sample belongs to the paragraph of its source line.  A sample in inlined code of another file belongs to the paragraph
of the instruction before it.  A sample at a barrier always belongs to the barriers.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from pytest_fa.features.ncu.nsight_report import SourceLine

BARRIERS, OTHER = "barriers", "other"
MAX_LINES = 10

# Pattern in a comment -> phase of the paragraph that the comment begins.
_PARAGRAPHS: tuple[tuple[str, str], ...] = (
    (r"S = Q|Q ?K\^?T|Q\.K", "Q.K^T"),
    (r"O \+= ?P|P ?V\b|P\.V", "P.V"),
    (r"\b[Ww]ait|[Bb]arrier|arrive", BARRIERS),
    (r"mask|row max|rescale|P = exp|row sum|softmax|[Nn]ormali[sz]e", "softmax"),
    (r"[Ll]oad|[Cc]opy|[Cc]opies|[Ss]tore|prefetch", "I/O"),
)
# Pattern in a line of code -> phase of that line, whatever its paragraph.
_LINES: tuple[tuple[str, str], ...] = (
    (r"__syncthreads|__syncwarp|barrier_sync|sync_\w+\(|\bwait\w*\(|mbarrier_\w*wait|mbarrier_arrive", BARRIERS),
    (r"\w*exp2?f?\(|(max|sum)_of_row|fmaxf", "softmax"),
)
_FUNCTION = re.compile(r"^(template|__device__|__global__|static|inline|FA_EXPORT|\w+ \w+\()")


def phases_of_source(text: str) -> dict[int, str]:
    """The phase of every line, by its number from 1.

    A function begins in phase `other`, unless a comment directly above it names a phase.
    """
    phases: dict[int, str] = {}
    phase, comment_line = OTHER, 0
    for number, line in enumerate(text.splitlines(), start=1):
        _, mark, comment = line.partition("//")
        if mark and line.strip().startswith("//"):
            comment_phase = _first_match(_PARAGRAPHS, comment)
            phase, comment_line = (comment_phase, number) if comment_phase else (phase, comment_line)
        elif _FUNCTION.match(line) and comment_line < number - 2:
            phase = OTHER
        phases[number] = _first_match(_LINES, line.partition("//")[0]) or phase
    return phases


def phase_samples(lines: tuple[SourceLine, ...], source_name: str, source: str) -> dict[str, int]:
    """The number of samples of each phase, the largest first.  `lines` must be in the order of their instructions."""
    phases = phases_of_source(source)
    samples: Counter[str] = Counter()
    last_phase = OTHER
    for line in lines:
        if Path(line.file).name == source_name:
            last_phase = phases.get(line.line, OTHER)
        samples[line.phase or last_phase] += line.samples
    return dict(samples.most_common())


def busiest_lines(lines: tuple[SourceLine, ...]) -> tuple[SourceLine, ...]:
    """The lines with the most samples, summed over all stall reasons."""
    samples_of: Counter[tuple[str, int]] = Counter()
    for line in lines:
        samples_of[(Path(line.file).name, line.line)] += line.samples
    return tuple(SourceLine(file, line, samples, "") for (file, line), samples in samples_of.most_common(MAX_LINES))


def _first_match(rules: tuple[tuple[str, str], ...], text: str) -> str:
    return next((phase for pattern, phase in rules if re.search(pattern, text)), "")
