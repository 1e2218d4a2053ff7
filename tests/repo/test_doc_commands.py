"""The commands of the pages that need only records work in a repository with records."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fa.features.bundle.commands import _parser
from pytest_fa.options.flags import all_options

REPOSITORY = Path(__file__).parents[2]
PAGES = {"how-to/compare.md": 6, "how-to/publish.md": 10}  # page -> least number of commands
SAVED = ("minimal", "cluster_latency", "sdpa_cudnn")  # the variants whose records are in the test's repository
OTHER_PROGRAMS = {  # program -> how its words may begin
    "./repro.sh": ("", "replay "),
    "cosign": ("sign-blob --bundle=FILE.sigstore.json ", "verify-blob --bundle=FILE.sigstore.json "),
    "git": ("bisect start ", "bisect run pytest ", "bisect reset"),
    "gh": ("attestation verify FILE --repo ",),
}


def commands_of_page(page: str) -> list[str]:
    """The commands of a page, without their comments."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with records of the H200 in `profiles/`, in `artifacts/records/`, and in 50 earlier commits."""
    folder = tmp_path_factory.mktemp("saved")
    for target in ("profiles/nvidia-h200", "artifacts/records"):
        (folder / target).mkdir(parents=True)
        for name in SAVED:
            shutil.copy(REPOSITORY / "profiles" / "nvidia-h200" / f"{name}.jsonl", folder / target)
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(folder / "profiles/nvidia-h200/minimal.jsonl", folder / name)
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "profiles"), *(("commit", "-q", "--allow-empty", "-m", "x"),) * 51):
        subprocess.run(["git", *identity, *words], cwd=folder, check=True)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_every_command_about_records_works(saved: Path, page: str) -> None:
    """Each `python -m pytest_fa` of a page exits with 0; a command about bundles is accepted; each option exists."""
    commands = commands_of_page(page)
    assert len(commands) >= PAGES[page]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for command in commands:
        program, *words = shlex.split(command)
        if words[:3] == ["-m", "pytest_fa", "bundle"]:
            assert _parser().parse_args(words[3:]).run
        elif program in OTHER_PROGRAMS:
            assert " ".join(words).startswith(OTHER_PROGRAMS[program])
        elif program == "python":
            process = subprocess.run(
                [sys.executable, *words], cwd=saved, env=environment, capture_output=True, text=True, check=False
            )
            assert process.returncode == 0, f"$ {command}\n{process.stdout}\n{process.stderr}"
        else:
            options = {word.partition("=")[0] for word in words if word.startswith("--fa-")}
            assert (program, options - {option.flag for option in all_options()}) == ("pytest", set())
