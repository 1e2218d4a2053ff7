"""`fa-regret`: a table that shows how good the choices of `auto` are at problems that no cost is fitted to."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from kernels.auto.costs import costs_of
from kernels.auto.problem import Problem
from kernels.auto.regret import Chosen, choices
from kernels.auto.rung_times import UNSEEN, read_rung_times
from pytest_fa.records.origin import origin_of_file
from tools.docs.block import NOTHING, Shown, TableProblem, figure, table, with_line

FEW_ROWS = 64  # queries of all heads that share a key/value head
KINDS: dict[str, Callable[[Problem], bool]] = {
    "all": lambda _: True,
    "as many keys as queries": lambda problem: problem.seq_q == problem.seq_k,
    "fewer queries than keys": lambda problem: problem.seq_q < problem.seq_k,
    f"of these, at most {FEW_ROWS} rows of queries": lambda problem: (
        problem.seq_q < problem.seq_k and problem.rows() <= FEW_ROWS
    ),
    "grouped heads": lambda problem: problem.heads != problem.kv_heads,
}
HEADS = ["problems", "number", "auto / fastest rung: mean", "worst", "auto / SDPA: mean", "worst"]


def block(words: str, root: Path) -> str:
    """The table of the GPU whose folder the words name.  Raises `TableProblem` if nothing was measured there."""
    times = read_rung_times(root / words, UNSEEN)
    costs = times and costs_of(str(times.environment.gpu), times.sms)
    if not times or not costs:
        raise TableProblem(f"no {UNSEEN} in {words}; measure it with `python -m kernels.auto.measure --unseen`")
    chosen = choices(times, costs)
    rows = [_row(name, [each for each in chosen if is_one(each.problem)]) for name, is_one in KINDS.items()]
    return with_line(table([HEADS, *rows]), origin_of_file(times.environment, times.source, times.measured_at))


def contents(words: str, _root: Path) -> Shown:
    """The file that the table shows."""
    return Shown(words, files=(UNSEEN,))


def _row(name: str, chosen: list[Chosen]) -> list[str]:
    cells = [name, str(len(chosen))]
    for ratios in ([each.regret for each in chosen], [each.to_sdpa for each in chosen if each.to_sdpa]):
        cells += [figure(statistics.mean(ratios), 3), figure(max(ratios), 3)] if ratios else [NOTHING, NOTHING]
    return cells
