"""The matrix of the diagnosis: every simulated mistake, in every dtype, at every case: named, unknown or misnamed.

`python -m tests.unit.judge.diagnosis_matrix` writes its table into docs/diagnosis.md.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from pathlib import Path

import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.judge.check import judge
from pytest_fa.judge.diagnosis import diagnose
from pytest_fa.judge.truth import make_truth
from pytest_fa.run.inputs import make_inputs
from tests.unit.judge.mistaken_kernels import MISTAKES, UNLISTED, Mistaken

DTYPES = ("fp16", "bf16")
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
UNKNOWN = "no known mistake gives this output"
PAGE = Path(__file__).parents[3] / "docs" / "diagnosis.md"
TABLE = re.compile(r"(<!-- diagnosis-matrix -->\n).*(<!-- /diagnosis-matrix -->)", re.DOTALL)


def cause(mistaken: Mistaken, case: str) -> str | None:
    """The cause that the diagnosis gives for a simulated kernel; None if its output is right at this case."""
    inputs = make_inputs(parse_case(case), torch.device("cpu"))
    truth, out = make_truth(inputs), mistaken.kernel(inputs)
    check = judge(out, truth, "same_precision")
    return None if check.passed else diagnose(out, truth, inputs, check, None, ()).cause


def verdict(words: str | None, names: tuple[str, ...]) -> str:
    """`right`, `unknown`, `named` or `misnamed`."""
    if words is None:
        return "right"
    if UNKNOWN in words:
        return "unknown"
    return "named" if any(name in words for name in names) else "misnamed"


@functools.cache
def verdicts(case: str) -> dict[str, tuple[str, str | None]]:
    """For each mistake at one case, the verdict and the words."""
    causes = {name: cause(mistaken, case) for name, mistaken in MISTAKES.items()}
    return {name: (verdict(words, MISTAKES[name].names), words) for name, words in causes.items()}


def table() -> str:
    """The matrix as a Markdown table: for each mistake and dtype, at how many cases it is named of those it changes."""
    rows = ["| mistake | fp16 | bf16 | misnamed |", "| --- | ---: | ---: | ---: |"]
    for name in MISTAKES:
        counts = {dtype: Counter(verdicts(case.format(dtype))[name][0] for case in CASES) for dtype in DTYPES}
        cells = [f"{count['named']} of {count.total() - count['right']}" for count in counts.values()]
        rows.append(f"| {name} | {' | '.join(cells)} | {sum(count['misnamed'] for count in counts.values())} |")
    return "\n".join(rows)


def page_with_table(text: str) -> str:
    """The text of the page with the table of this matrix."""
    return TABLE.sub(lambda block: f"{block[1]}\n{table()}\n\n{block[2]}", text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--show"]:
        for one_case in (case.format(dtype) for case in CASES for dtype in DTYPES):
            for mistake, (answer, sentence) in verdicts(one_case).items():
                sys.stdout.write(f"{one_case:38} {answer:9} {mistake:28} {sentence}\n")
            for mistake, unlisted in UNLISTED.items():
                sentence = cause(unlisted, one_case)
                sys.stdout.write(f"{one_case:38} {verdict(sentence, unlisted.names):9} ({mistake}) {sentence}\n")
            sys.stdout.flush()
    else:
        PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
