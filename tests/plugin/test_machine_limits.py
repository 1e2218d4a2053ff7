"""A limit of the shell that keeps a right kernel from being judged is named, and the kernel is not blamed."""

from __future__ import annotations

import pytest

from tests.projects import CASE, ONE_CASE, Project

SMALL_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"


def test_a_small_file_limit_is_named(project: Project) -> None:
    """The test fails with one sentence, without a traceback and without a record."""
    project.python_variant("good")
    project.write("conftest.py", SMALL_FILES)
    run = project.suite(ONE_CASE, "-k", "test_correct and good")
    test = f"test_correct[good-{CASE}]"
    sentence = f"good-{CASE} was not judged: ulimit -f limits files to 8 KB, which is too little here"
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert run.reasons == {test: sentence}
    assert project.records == []
