"""A user's own tests with `fa_run` have what features add without an option, and the cases of the shipped tests."""

from __future__ import annotations

from tests.projects import CASE, Project

OWN_TESTS = """\
def test_by_name(request):
    fa_run = request.getfixturevalue("fa_run")
    assert callable(fa_run.gate)
    try:
        fa_run.nothing
    except AttributeError as problem:
        assert "it has: build, correct, property, speed, " in str(problem)
"""
PROFILED = """\
def test_profile(fa_run, fa_variant, fa_case):
    pass


def test_gate(fa_run, fa_variant):
    pass
"""


def test_a_fixture_that_a_test_gets_by_name_has_all_methods(project: Project) -> None:
    """`fa_run.gate` is there if no test of the run names `fa_run` in its arguments."""
    project.write("test_own.py", OWN_TESTS)
    assert project.run(".", "-p", "no:cacheprovider").outcomes == {"test_by_name": "passed"}


def test_an_own_test_has_the_cases_of_the_shipped_one(project: Project) -> None:
    """Without its feature's option, a test with the name of a shipped one runs over the same variants and shapes."""
    project.python_variant("mine")
    project.write("test_own.py", PROFILED)
    run = project.run_here("--collect-only", "-q", "test_own.py", "--fa-variant=mine", f"--fa-case={CASE}")
    shape = CASE.removesuffix("-seed0")
    assert [line for line in run.outlines if "::" in line] == [
        f"test_own.py::test_profile[mine-{shape}]",
        "test_own.py::test_gate[mine]",
    ]
