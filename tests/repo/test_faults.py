"""The page of faults: each row names a test that exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROW = re.compile(r"\| (?P<fault>.+) \| (?P<outcome>.+) \| `(?P<test>[^ ].*)` \|")
LEAST_ROWS = 60


def rows() -> list[re.Match[str]]:
    """The rows of the page's tables."""
    lines = (REPOSITORY / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    return [match for line in lines if (match := ROW.fullmatch(line))]


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """The ids of all tests in the files that the page names."""
    files = sorted({match["test"].partition("::")[0] for match in rows()})
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "--collect-only", "-q"]
    run = subprocess.run(
        [*command, *(f"tests/{name}" for name in files)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return set(run.stdout.splitlines())


def test_every_fault_has_a_test(collected: set[str]) -> None:
    """Each row of `docs/faults.md` names a test that is collected."""
    assert [match["test"] for match in rows() if match["test"] not in collected] == []


def test_there_are_many_faults() -> None:
    """The page has at least 60 rows, each with another test."""
    tests = [match["test"] for match in rows()]
    assert len(tests) >= LEAST_ROWS
    assert len(set(tests)) == len(tests)
