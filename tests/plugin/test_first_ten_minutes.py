"""The pages for beginners: all their commands work, in their order, in an empty folder."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.projects import PROGRAMS, inner_environment

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"tutorial/first-kernel.md": 10, "how-to/adopt.md": 10}  # page -> least number of commands
FAILS = "# exits with 1"
NOT_HERE = ("pip install", "mkdir ")


def commands(page: str) -> list[str]:
    """The commands of a page, without those that install the package and create the folder."""
    blocks = re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [command for command in lines if not command.startswith(NOT_HERE)]


@pytest.mark.nightly
@pytest.mark.needs_nvcc
@pytest.mark.parametrize("page", PAGES)
def test_every_command_does_what_the_page_says(
    tmp_path: Path, shared_cache: Path, resident_server: str, page: str
) -> None:
    """Each command succeeds, except those marked to exit with 1; `pytest` and `python` are this environment's."""
    assert len(commands(page)) >= PAGES[page]
    fixed = {"XDG_CACHE_HOME": str(shared_cache), "PY_COLORS": "0", "COLUMNS": "140"}
    fixed["PYTEST_ADDOPTS"] = "--fa-arch=sm_90a"  # as on a machine with one GPU, not every architecture
    environment = {**inner_environment(), **fixed, "PYTEST_FA_SERVER": resident_server}
    folder = tmp_path / "tryout"
    folder.mkdir()
    for command in commands(page):
        process = subprocess.run(
            [str(shutil.which("bash")), "-c", PROGRAMS + command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        expected = 1 if FAILS in command else 0
        assert process.returncode == expected, f"$ {command}\n{process.stdout}\n{process.stderr}"
