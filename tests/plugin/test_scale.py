"""The cost of collection: linear in the number of tests."""

from __future__ import annotations

import pytest

from tests.projects import COMPANIONS, NewProject, Project

# For an inner conftest.py: counts the function calls during collection and writes the numbers of tests and of calls.
# These numbers do not depend on the speed of the machine.  Hashing or comparing a test counts as a call too, so that
# building a set of tests and searching a list of tests are counted.
COUNT_CALLS = """\
import pathlib
import sys

import pytest

calls = 0
pytest.Function.__hash__ = lambda self: id(self) // 16
pytest.Function.__eq__ = lambda self, other: self is other


def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")


@pytest.hookimpl(tryfirst=True)
def pytest_collection():
    sys.setprofile(count)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    sys.setprofile(None)
    pathlib.Path(__file__).with_name("calls.txt").write_text(f"{len(session.items)} {calls}")
"""

OWN_TESTS = """\
def test_own(fa_variant, fa_case):
    pass


def test_own_speed(fa_variant, fa_case, fa_benchmark):
    pass
"""

FOLDERS = 3
# The variants are not tested at one of the four shapes of the suite `history`, so the companions are deselected there.
SELECTION = ("-k", "not (variant and b2h2s64d64)")
CASES, SHAPES = 9, 3


def collect(project: Project, variants: int) -> tuple[int, int]:
    """Collect a project with so many variants: the number of tests, and of calls during collection."""
    project.write("conftest.py", COUNT_CALLS)
    for index in range(variants):
        project.python_variant(f"variant_{index}")
    for index in range(FOLDERS):
        project.write(f"folder_{index}/test_own_{index}.py", OWN_TESTS)
    assert project.run("--collect-only", "-q", "-q", *SELECTION).ret == 0
    tests, calls = map(int, (project.folder / "calls.txt").read_text(encoding="utf-8").split())
    return tests, calls


@pytest.mark.nightly
def test_collection_is_linear_in_the_number_of_tests(new_project: NewProject) -> None:
    """Forty further variants cost the same number of calls in a project of 20 variants as in one of 60.

    The tests are in several folders, because some steps run once for each folder.
    """
    sizes = (20, 60, 100)
    runs = [collect(new_project(f"variants_{size}"), size) for size in sizes]
    expected = [FOLDERS * (size * (CASES + SHAPES) + len(COMPANIONS) * SHAPES) for size in sizes]
    assert expected == [tests for tests, _ in runs]
    first, second, third = (calls for _, calls in runs)
    assert third - second < 1.05 * (second - first)
