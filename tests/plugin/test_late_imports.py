"""After the first kernel has run, the process that decides imports nothing of this package."""

from __future__ import annotations

import json

import pytest

from pytest_fa.records.outcome import UNDECIDED_STATUS
from tests.projects import CASE, WRITE_LATE_IMPORTS, Project

MIN_MODULES = 100  # that a run with kernels imports


@pytest.mark.parametrize(
    "options",
    [
        (f"--fa-case={CASE}",),
        (f"--fa-case={CASE}", "-v", "--fa-save", "--fa-html=report.html"),
        (f"--fa-case={CASE}", "-k", "test_gate", "--fa-gate=50", "--fa-gate-baseline=same"),
    ],
    ids=["plain", "html", "gate"],
)
def test_nothing_is_imported_late(project: Project, options: tuple[str, ...]) -> None:
    """What a run needs until its last line is imported before its first test begins to run."""
    project.write("conftest.py", WRITE_LATE_IMPORTS)
    project.python_variant("mine")
    project.python_variant("same")
    run = project.suite("--fa-variant=mine", *options)
    assert run.ret in (pytest.ExitCode.OK, UNDECIDED_STATUS), run.text
    early, late = json.loads((project.folder / "imports.json").read_text(encoding="utf-8"))
    assert (late, early > MIN_MODULES) == ([], True)
