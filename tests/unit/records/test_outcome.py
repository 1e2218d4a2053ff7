"""The table of outcomes: it is complete, it contradicts itself nowhere, and no other module spells an outcome."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import pytest_fa
from pytest_fa.records.outcome import FAILURE_STATUS, UNDECIDED_STATUS, WORST_FIRST, Defect, Outcome, State
from tests.factories import RECORD

PACKAGE = Path(pytest_fa.__file__).parent
# Kernels of the self-test, which look like a user's: they attack what they name by its text.
KERNELS = tuple(PACKAGE / "features" / "selftest" / f"python_{name}" for name in ("cheats", "faults", "twins"))
# Words that also mean something else: the state of a stage or of a program, the role of a variant, a class of a page.
COMMON_WORDS = {Outcome.OK, Outcome.FAILED, Outcome.WRONG}


def spelled_outcomes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the word of each outcome that is a string literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
            if any(_name(each).endswith("outcome") for each in compared):
                yield from (each for part in compared for each in _words(part, set(Outcome)))
        elif isinstance(node, ast.keyword) and (node.arg or "").endswith("outcome"):
            yield from _words(node.value, set(Outcome))
        elif isinstance(node, ast.Constant):
            yield from _words(node, set(Outcome) - COMMON_WORDS)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _words(node: ast.expr, words: set[Outcome]) -> Iterator[tuple[int, str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in words:
            yield part.lineno, part.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("record.outcome == 'ok'", {"ok"}),
        ("outcome in ('ok', 'wrong')", {"ok", "wrong"}),
        ("CaseResult(outcome='failed')", {"failed"}),
        ("CaseResult('not_built', message)", {"not_built"}),
        ("{'hung': 'watchdog'}", {"hung"}),
        ("stage.state == 'failed'", set()),
        ("record.outcome == Outcome.OK", set()),
        ("f'the outcome is ok'", set()),
    ],
)
def test_a_spelled_outcome_is_seen(text: str, words: set[str]) -> None:
    """A literal is an outcome if it has no other meaning, or if it is compared with one or passed as one."""
    assert {word for _, word in spelled_outcomes(ast.parse(text))} == words


def test_no_other_module_spells_an_outcome() -> None:
    """Outcomes are spelled in their table alone, so that a new one is added in one place."""
    table = PACKAGE / "records" / "outcome.py"
    spelled = [
        f"{path.relative_to(PACKAGE)}:{line}: {word}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != table and path.parent not in KERNELS
        for line, word in spelled_outcomes(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert spelled == []


def test_every_outcome_has_a_row() -> None:
    """Each outcome has a word of its own, a heading, a state, and one of pytest's exit statuses that a run can have."""
    assert len({outcome.heading for outcome in Outcome}) == len(Outcome)
    assert all(outcome.heading and outcome.state in State for outcome in Outcome)
    assert {outcome.exit_status for outcome in Outcome} == {0, FAILURE_STATUS, UNDECIDED_STATUS} == {0, 1, 10}
    assert [outcome for outcome in Outcome if outcome.name.lower() != outcome.value] == []


@pytest.mark.parametrize("outcome", Outcome)
def test_a_row_does_not_contradict_itself(outcome: Outcome) -> None:
    """An outcome has the state of a failure if it is one, and a defect only then; a failed gate has none."""
    assert outcome.is_failure == outcome.state.is_failure
    assert (outcome.defect is not None) == (outcome.is_failure and outcome is not Outcome.GATE_FAILED)
    assert outcome.is_verdict == (outcome is Outcome.OK or outcome.is_failure)


def test_the_outcomes_that_are_no_failures() -> None:
    """A test without a failure passed, was not measured, or has no verdict; only the last one changes the status."""
    assert {outcome for outcome in Outcome if not outcome.is_failure} == {
        Outcome.OK,
        Outcome.NOT_MEASURED,
        Outcome.INCONCLUSIVE,
    }
    assert [outcome for outcome in Outcome if outcome.exit_status == UNDECIDED_STATUS] == [Outcome.INCONCLUSIVE]


def test_every_state_of_a_failure_is_ranked() -> None:
    """The states that a failure can lead to are those that are ranked by how bad they are, and a cheat is the worst."""
    assert {outcome.state for outcome in Outcome if outcome.is_failure} == set(WORST_FIRST)
    assert WORST_FIRST[0] is Outcome.CHEAT.state
    assert {outcome.defect for outcome in Outcome} == {None, *Defect}


@pytest.mark.parametrize("outcome", Outcome)
def test_an_outcome_is_its_word(outcome: Outcome) -> None:
    """In records, texts and messages of assertions, an outcome is the word that it always was."""
    line = msgspec.json.encode(msgspec.structs.replace(RECORD, outcome=outcome))
    assert f'"outcome":"{outcome.value}"'.encode() in line
    assert (f"{outcome}", repr(outcome)) == (outcome.value, f"{outcome.value!r}")
