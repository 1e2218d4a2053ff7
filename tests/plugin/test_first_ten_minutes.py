"""The pages for beginners: all their commands work, in their order, in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"first-ten-minutes.md": 10, "add-a-variant.md": 10}  # page -> least number of commands
FAILS = "# exits with 1"
NOT_HERE = ("pip install", "mkdir ")


def commands(page: str) -> list[str]:
    """The commands of a page, without those that install the package and create the folder."""
    blocks = re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [command for command in lines if not command.startswith(NOT_HERE)]


@pytest.mark.needs_nvcc
@pytest.mark.parametrize("page", PAGES)
def test_every_command_does_what_the_page_says(tmp_path: Path, shared_cache: Path, page: str) -> None:
    """Each command succeeds, except those marked to exit with 1; `pytest` and `python` are this environment's."""
    assert len(commands(page)) >= PAGES[page]
    fixed = {"XDG_CACHE_HOME": str(shared_cache), "CUDA_VISIBLE_DEVICES": "", "PY_COLORS": "0", "COLUMNS": "140"}
    fixed["PYTEST_ADDOPTS"] = "--fa-arch=sm_90a"  # as on a machine with one GPU, not every architecture
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, more in (("python", ""), ("pytest", " -m pytest")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{more} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = {**inherited, **fixed, "PATH": f"{programs}:{os.environ['PATH']}"}
    folder = tmp_path / "tryout"
    folder.mkdir()
    for command in commands(page):
        process = subprocess.run(
            [str(shutil.which("bash")), "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        expected = 1 if FAILS in command else 0
        assert process.returncode == expected, f"$ {command}\n{process.stdout}\n{process.stderr}"
