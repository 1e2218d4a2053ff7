"""The tests of which only some parameters run for every change exist."""

from __future__ import annotations

from pathlib import Path

from tests.tiers import EVERY_NTH

TESTS = Path(__file__).parents[1]


def test_every_name_is_that_of_a_test() -> None:
    """A test that was renamed would run with all of its parameters again."""
    unknown = [name for name in EVERY_NTH if not is_a_test(*name.split("::"))]
    assert unknown == []


def is_a_test(path: str, function: str) -> bool:
    """Whether the file has a function of this name."""
    file = TESTS / path
    return file.is_file() and f"def {function}(" in file.read_text(encoding="utf-8")
