"""The diagnosis never names a wrong mistake, and names every mistake that it knows at some case of each precision.

Each mistake runs at one case of one precision; in the nightly run, at every case of all.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.judge.diagnosis_matrix import (
    PAGE,
    PRECISIONS,
    Verdict,
    cells_of_page,
    names_of_part,
    page_with_table,
    part_of_matrix,
    verdict,
    whole_matrix,
)
from tests.unit.judge.mistaken_kernels import MISTAKES, UNLISTED

LONGEST_CLAUSE = 80
# fp32 has no other dtype of its size, and its kernels have no roundings to 16 bits.
NOT_IN_FP32 = (
    "inputs as other dtype",
    "all as other dtype",
    "all a little smaller",
    "P truncated",
    "output truncated",
    "P and output truncated",
    "Q K^T in 16 bits",
    "all sums in 16 bits",
    "all sums in 16 bits, one by one",
)
NO_MISTAKE = {
    (name, precision) for name in NOT_IN_FP32 for precision, (dtype, _) in PRECISIONS.items() if dtype == "fp32"
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["part", pytest.param("whole", marks=pytest.mark.nightly)])
def verdicts(request: pytest.FixtureRequest) -> list[tuple[str, str, str, Verdict]]:
    """The verdicts of a part of the matrix, and of all of it: mistake, precision, case, verdict."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = list(whole_matrix() if request.param == "whole" else part_of_matrix())
    torch.set_num_threads(threads)
    return [row for row in rows if row[-1].words is not None]


def test_the_matrix(verdicts: list[tuple[str, str, str, Verdict]], request: pytest.FixtureRequest) -> None:
    """All that must hold of the verdicts, in one test: with `pytest -n`, each worker would make them again."""
    require_no_wrong_name(verdicts)
    is_whole = request.node.callspec.params["verdicts"] == "whole"
    if is_whole:
        require_every_precision(verdicts)
    names = {*MISTAKES, *UNLISTED} if is_whole else {*names_of_part()}
    assert names <= {name for name, *_ in verdicts}
    require_the_names_of_the_page(verdicts)
    require_short_clauses(verdicts)


def require_no_wrong_name(verdicts: list[tuple[str, str, str, Verdict]]) -> None:
    """A simulated mistake gets its own name or none; an unlisted one gets none, or a true sentence."""
    assert [] == [row for row in verdicts if row[-1].answer == "misnamed"]


def require_every_precision(verdicts: list[tuple[str, str, str, Verdict]]) -> None:
    """Every simulated mistake makes the output wrong at one case or more of each precision, if it exists there."""
    wanted = {(name, precision) for name in MISTAKES for precision in PRECISIONS} - NO_MISTAKE
    assert wanted == {(name, precision) for name, precision, _, _ in verdicts if name in MISTAKES}


def require_the_names_of_the_page(verdicts: list[tuple[str, str, str, Verdict]]) -> None:
    """Every mistake is named wherever the page says that it always is, and never if the page says that it never is."""
    page = cells_of_page(PAGE.read_text(encoding="utf-8"))
    answers: dict[tuple[str, str], set[str]] = {}
    for name, precision, _, answer in verdicts:
        if name in MISTAKES:
            answers.setdefault((name, precision), set()).add(answer.answer)
    wrong = []
    for place, seen in answers.items():
        named, _, changed = page[place].partition("/")
        expected = {"named"} if named == changed else {"unknown"} if named == "0" else {"named", "unknown"}
        if not seen <= expected:
            wrong.append((*place, page[place], seen))
    assert [] == wrong


def test_the_page_names_every_mistake() -> None:
    """The page has each mistake, and each is named at some case of each precision in which it exists."""
    page = cells_of_page(PAGE.read_text(encoding="utf-8"))
    assert {(name, precision) for name in MISTAKES for precision in PRECISIONS} == set(page)
    assert {place for place, cell in page.items() if cell.startswith("0/")} == set()
    assert {place for place, cell in page.items() if cell == "-"} == NO_MISTAKE


def require_short_clauses(verdicts: list[tuple[str, str, str, Verdict]]) -> None:
    """The first clause of a named mistake has at most 80 characters."""
    causes = {answer.words for *_, answer in verdicts if answer.answer == "named" and answer.words}
    clauses = {words.partition(": ")[0].partition("; ")[0] for words in causes}
    assert [] == sorted(clause for clause in clauses if len(clause) > LONGEST_CLAUSE)


@pytest.mark.nightly
def test_the_page_has_this_matrix() -> None:
    """The table of the page is the one that `python -m tests.unit.judge.diagnosis_matrix` writes."""
    text = PAGE.read_text(encoding="utf-8")
    assert page_with_table(text) == text


@pytest.mark.parametrize(
    ("policy", "precision", "case", "named"),
    [
        ("fp8", "fp16", "b1h1s64d64-{}-seed0", {"scale not applied", "K and V exchanged", "second tile missing"}),
        ("fp8", "bf16", "b1h1s64d64-{}-seed0", {"scale not applied", "K and V exchanged", "second tile missing"}),
        ("absolute", "fp16", "b1h1s64d64-{}-seed0", {"scale 1/D", "all 1.01 times", "second tile missing"}),
    ],
)
def test_other_policies(policy: str, precision: str, case: str, named: set[str]) -> None:
    """Under `fp8` and `absolute`, a mistake is named by its own name, and an unlisted one gets no name."""
    chosen = named | {"squared", "small noise", "only noise", "one element wrong"}
    answers = {name: verdict(name, precision, case, policy).answer for name in chosen}
    assert "misnamed" not in answers.values()
    assert named == {name for name, answer in answers.items() if answer == "named"}
