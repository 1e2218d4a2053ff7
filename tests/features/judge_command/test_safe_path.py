"""`judge` is documented and printed with `python -P`, with which a `pytest_fa/` of the current folder does not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_fa
from pytest_fa.features.judge_command.document import schema
from pytest_fa.features.judge_command.question import Question

REPOSITORY = Path(__file__).parents[3]
PAGES = ("README.md", "docs/reference/judge.md", "docs/how-to/ci.md", "docs/SKILL.md")
FORGED = "import sys\nprint('{}')\nsys.exit(0)\n"


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_show_it(page: str) -> None:
    """Every command line of a page that starts `judge` has `-P`."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert re.findall(r"^.*python3? -m pytest_fa judge .*$", text, re.MULTILINE) == []
    assert "python -P -m pytest_fa judge" in text


def test_printed_commands_have_it() -> None:
    """The command that repeats a verdict has it, too."""
    assert Question("mine", ("mine",)).rerun_command() == "python -P -m pytest_fa judge mine"


def test_another_package_of_this_name_does_not_run(tmp_path: Path) -> None:
    """With `-P` the installed package runs, although the current folder has one of the same name."""
    (tmp_path / "pytest_fa").mkdir()
    for name in ("__init__.py", "__main__.py"):
        (tmp_path / "pytest_fa" / name).write_text(FORGED)
    environment = {**os.environ, "PYTHONPATH": str(Path(pytest_fa.__file__).parents[1])}
    command = [sys.executable, "-P", "-m", "pytest_fa", "judge", "--schema"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == schema()
