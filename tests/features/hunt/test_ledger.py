"""The ledger excuses the known fault, on the versions that have it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from pytest_fa.errors import UsageProblem
from pytest_fa.features.hunt.example import read_example
from pytest_fa.features.hunt.ledger import LEDGER_NAME, Ledger, read_ledger
from pytest_fa.records.outcome import Outcome

ENTRY = """\
- variant: sdpa_*
  example: b1h1s1d64-fp16-sink-seed0
  pattern: "*-sink-*"
  outcome: wrong
  because: the sink is lost
  reference: https://example.org/1
  versions: {pytest: ">=8"}
"""
SMALLEST = read_example("b1h1s1d64-fp16-sink-seed0")


def written(folder: Path, text: str = ENTRY) -> list[Path]:
    """The folders of a ledger."""
    (folder / LEDGER_NAME).write_text(text)
    return [folder, folder / "absent"]


def test_only_the_known_fault_is_excused(tmp_path: Path) -> None:
    """Another outcome, another case, another variant, device or version is not."""
    folders = written(tmp_path)
    ledger = Ledger(folders, "sdpa_flash", "cuda")
    assert ledger.examples == (SMALLEST,)
    assert ledger.reference_of(SMALLEST, Outcome.WRONG) == "the sink is lost (https://example.org/1)"
    assert ledger.reference_of(read_example("b2h1s7d64-bf16-sink-seed3"), Outcome.WRONG)
    assert not ledger.reference_of(SMALLEST, Outcome.CRASHED)
    assert not ledger.reference_of(read_example("b1h1s1d64-fp16-seed0"), Outcome.WRONG)
    assert Ledger(folders, "mine", "cuda").examples == Ledger(folders, "sdpa_flash", "cpu").examples == ()
    older = written(tmp_path, ENTRY.replace(">=8", "<8"))
    assert Ledger(older, "sdpa_flash", "cuda").examples == ()
    missing = written(tmp_path, ENTRY.replace("pytest:", "no_such_package:"))
    assert Ledger(missing, "sdpa_flash", "cuda").examples == ()


def test_a_fault_that_is_gone_is_unexpected(tmp_path: Path) -> None:
    """The sentence says what to do."""
    (text,) = Ledger(written(tmp_path), "sdpa_flash", "cuda").unexpected([SMALLEST], {})
    assert text == (
        "b1h1s1d64-fp16-sink-seed0 no longer fails with wrong: the sink is lost; drop it from known.yaml, or give the "
        "versions that have it"
    )
    without_seed = written(tmp_path, ENTRY.replace("-sink-seed0", "-sink"))
    assert len(Ledger(without_seed, "sdpa_flash", "cuda").unexpected([SMALLEST], {})) == 1
    assert Ledger(written(tmp_path), "sdpa_flash", "cuda").unexpected([], {}) == ()
    (text,) = Ledger(written(tmp_path), "sdpa_flash", "cuda").unexpected([], {SMALLEST: "no sink"})
    assert text == "b1h1s1d64-fp16-sink-seed0 of known.yaml cannot be judged: no sink"


def test_a_known_fault_that_ends_the_process_is_not_launched(tmp_path: Path) -> None:
    """Other known faults are, because another one may show beside them."""
    ledger = Ledger(written(tmp_path), "sdpa_flash", "cuda")
    assert ledger.excuses(SMALLEST, Outcome.WRONG)
    assert not ledger.avoids(SMALLEST)
    ending = Ledger(written(tmp_path, ENTRY.replace("wrong", "device_error")), "sdpa_flash", "cuda")
    assert ending.avoids(SMALLEST)
    assert not ending.avoids(read_example("b1h1s1d64-fp16-seed0"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("outcome: wrong", "outcome: bad", "Invalid enum value 'bad'"),
        ("  because: the sink is lost\n", "", "missing required field `because`"),
        ("b1h1s1d64-fp16-sink-seed0", "b1h1", "is malformed"),
        (">=8", "8 or more", "Invalid specifier"),
        ("because", "why", "Object contains unknown field `why`"),
        ("outcome: wrong", "outcome: ok", "ok is no failure"),
        ("*-sink-*", "*-cap*", "its pattern does not match it"),
    ],
)
def test_a_ledger_that_cannot_be_read(tmp_path: Path, old: str, new: str, problem: str) -> None:
    """The error names the file and what is wrong in it."""
    with pytest.raises(UsageProblem) as raised:
        read_ledger(written(tmp_path, ENTRY.replace(old, new))[0] / LEDGER_NAME)
    assert str(raised.value).startswith(f"{tmp_path / LEDGER_NAME}: ")
    assert problem in str(raised.value)
