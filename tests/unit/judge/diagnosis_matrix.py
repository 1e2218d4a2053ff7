"""The matrix of the diagnosis: every simulated mistake, in every precision, at every case: named, unknown or misnamed.

`python -m tests.unit.judge.diagnosis_matrix` writes its table into docs/appendix/diagnosis.md.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import Truth
from tests.unit.judge.float32_kernels import cut_off
from tests.unit.judge.mistaken_kernels import MISTAKES, UNLISTED, Mistaken, tf32_products


class Precision(NamedTuple):
    """The dtype of a kernel, and the roundings that its manifest declares."""

    dtype: str
    rounds: tuple[Rounding, ...] = ()


PRECISIONS = {
    "fp16": Precision("fp16"),
    "bf16": Precision("bf16"),
    "fp32": Precision("fp32"),
    "fp32, tf32": Precision("fp32", ("tf32",)),
}
CASES = (  # the dtype stands for {}
    "b1h1s64d64-{}-seed0",  # S = D, one head
    "b2h4s100d64-{}-seed0",  # no multiple of a tile
    "b2h3s100d64-{}-causal-seed0",
    "b1h4s130d128-{}-kv2-seed0",
    "b1h4s96d128-{}-causal-kv2-seed0",
    "b1h2s70d64-{}-causal_br-sk150-seed0",
    "b1h2s150d64-{}-causal_br-sk70-seed0",  # queries that see no key
    "b2h2s80d64-{}-bshd-seed0",
)
ALL = MISTAKES | UNLISTED
# Outputs that are nearly the mean of V: how many are named depends on how the CPU rounds its sums.
VARIES = {("inputs as other dtype", "fp16"), ("all as other dtype", "fp16")}
UNKNOWN = "no known mistake gives this output"
PAGE = Path(__file__).parents[3] / "docs" / "appendix" / "diagnosis.md"
SEPARATOR = "; "  # of mistakes in a row of the table
TABLE = re.compile(r"(<!-- diagnosis-matrix -->\n).*(<!-- /diagnosis-matrix -->)", re.DOTALL)


class Verdict(NamedTuple):
    """What the diagnosis says of a mistake at one case: `right` (the output is), `unknown`, `named` or `misnamed`."""

    answer: str
    words: str | None  # None if the output is right


@functools.lru_cache(maxsize=len(CASES))
def _inputs_and_truth(case: str, rounds: tuple[Rounding, ...], policy: str) -> tuple[Inputs, Truth]:
    inputs = make_inputs(parse_case(case), torch.device("cpu"))
    return inputs, truth_of("attention", inputs, rounds, policy)


def cause(mistaken: Mistaken, precision: str, case: str, policy: str = "same_precision") -> str | None:
    """The cause that the diagnosis gives for a simulated kernel; None if its output is right at this case."""
    dtype, rounds = PRECISIONS[precision]
    inputs, truth = _inputs_and_truth(case.format(dtype), rounds, policy)
    with tf32_products(cut_off) if "tf32" in rounds else nullcontext():
        out = mistaken.kernel(inputs)
    check = check_output(out, truth, policy)
    return None if check.passed else diagnose(out, truth, inputs, check, None, (), rounds=rounds).cause


def verdict(name: str, precision: str, case: str, policy: str = "same_precision") -> Verdict:
    """The verdict on one mistake; it is computed once."""
    return _verdict(name, precision, case, policy)


@functools.cache
def _verdict(name: str, precision: str, case: str, policy: str) -> Verdict:
    words = cause(ALL[name], precision, case, policy)
    if words is None:
        return Verdict("right", words)
    if UNKNOWN in words:
        return Verdict("unknown", words)
    return Verdict("named" if any(part in words for part in ALL[name].names) else "misnamed", words)


def whole_matrix(policy: str = "same_precision") -> Iterator[tuple[str, str, str, Verdict]]:
    """Every mistake in every precision at every case, with its verdict; unlisted mistakes, too."""
    for precision in PRECISIONS:
        for case in CASES:
            for name in ALL:
                yield name, precision, case, verdict(name, precision, case, policy)


def names_of_part() -> list[str]:
    """Every fourth mistake."""
    return [*MISTAKES, *UNLISTED][::4]


def part_of_matrix() -> Iterator[tuple[str, str, str, Verdict]]:
    """Every fourth mistake at one precision and one case where its output is wrong; these take turns."""
    for place, name in enumerate(names_of_part()):
        for step in range(len(CASES) * len(PRECISIONS)):
            precision = list(PRECISIONS)[(place + step) % len(PRECISIONS)]
            case = CASES[(place + step // len(PRECISIONS)) % len(CASES)]
            if (answer := verdict(name, precision, case)).words is not None:
                yield name, precision, case, answer
                break


def cells(name: str) -> dict[str, str]:
    """For each precision, at how many cases a mistake is named of those where its output is wrong."""
    counts = {precision: Counter(verdict(name, precision, case).answer for case in CASES) for precision in PRECISIONS}
    return {
        precision: f"{_how_often(name, precision, count)}/{count.total() - count['right']}"
        for precision, count in counts.items()
    }


def _how_often(name: str, precision: str, count: Counter[str]) -> str:
    """At how many cases a mistake is named; `some` where that depends on the CPU, and at least one."""
    return "some" if (name, precision) in VARIES and count["named"] else str(count["named"])


def table() -> str:
    """The matrix as a Markdown table."""
    return table_of({name: tuple(cells(name).values()) for name in MISTAKES})


def table_of(matrix: dict[str, tuple[str, ...]]) -> str:
    """The table of a matrix; mistakes with the same cells share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, row in matrix.items():
        alike.setdefault(tuple("-" if cell == "0/0" else cell for cell in row), []).append(name)
    rows = [f"| mistakes | {' | '.join(PRECISIONS)} |", f"| --- |{' ---: |' * len(PRECISIONS)}"]
    return "\n".join([*rows, *(f"| {SEPARATOR.join(names)} | {' | '.join(row)} |" for row, names in alike.items())])


def page_with_table(text: str) -> str:
    """The text of the page with the table of this matrix."""
    return TABLE.sub(lambda block: f"{block[1]}\n{table()}\n\n{block[2]}", text)


def cells_of_page(text: str) -> dict[tuple[str, str], str]:
    """The cells of the page's table, by mistake and precision."""
    match = TABLE.search(text)
    lines = match[0].splitlines() if match else []
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return {
        (name, column): cell
        for row in rows
        for name in row[0].split(SEPARATOR)
        for column, cell in zip(header[1:], row[1:], strict=True)
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--show"]:
        for mistake, of, where, (state, sentence) in whole_matrix(*sys.argv[2:]):
            sys.stdout.write(f"{where.format(of):42} {state:9} {mistake:28} {sentence}\n")
            sys.stdout.flush()
    else:
        PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
