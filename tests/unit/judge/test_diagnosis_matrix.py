"""The diagnosis never names a wrong mistake, and names every mistake that it knows at some case of each dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.judge.diagnosis_matrix import CASES, DTYPES, PAGE, cause, page_with_table, verdict, verdicts
from tests.unit.judge.mistaken_kernels import MISTAKES, UNLISTED

CASES_OF_BOTH = [case.format(dtype) for case in CASES for dtype in DTYPES]
LONGEST_CLAUSE = 80
# fp16 bits that are read as bf16 are numbers of all sizes, down to fp16's subnormal ones.  The bound on each row does
# not expect such rows.
NEVER_NAMED = {"fp16": {"inputs as other dtype"}}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES_OF_BOTH)
def test_no_mistake_gets_a_wrong_name(case: str) -> None:
    """At every case, a simulated mistake is named by its own name or called unknown."""
    assert [] == [(name, words) for name, (answer, words) in verdicts(case).items() if answer == "misnamed"]


@pytest.mark.parametrize("case", CASES_OF_BOTH)
def test_unlisted_mistakes_are_not_named(case: str) -> None:
    """A kernel that is wrong for a reason that the diagnosis does not know gets no name, or a true description."""
    causes = {name: (cause(unlisted, case), unlisted.names) for name, unlisted in UNLISTED.items()}
    assert [] == [(name, words) for name, (words, names) in causes.items() if verdict(words, names) == "misnamed"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mistake_is_named(dtype: str) -> None:
    """Every simulated mistake is named at one case or more, except those of NEVER_NAMED."""
    named = {name for case in CASES for name, (answer, _) in verdicts(case.format(dtype)).items() if answer == "named"}
    assert NEVER_NAMED.get(dtype, set()) == set(MISTAKES) - named


def test_the_first_clause_is_short() -> None:
    """The first clause of a named mistake has at most 80 characters."""
    causes = {
        words for case in CASES_OF_BOTH for answer, words in verdicts(case).values() if answer == "named" and words
    }
    clauses = {words.partition(": ")[0].partition("; ")[0] for words in causes}
    assert [] == sorted(clause for clause in clauses if len(clause) > LONGEST_CLAUSE)


def test_the_page_has_this_matrix() -> None:
    """The table in docs/diagnosis.md is the one that `python -m tests.unit.judge.diagnosis_matrix` writes."""
    text = PAGE.read_text(encoding="utf-8")
    assert page_with_table(text) == text
