"""Git repositories with kernels, for the tests of `--fa-gate-baseline=git:REV`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.factories import PYTHON_MANIFEST

IDENTITY = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org")
# Correct attention that takes as long as it is told: the rest of its time is a loop.
TIMED_SOURCE = """\
import time

import torch

MILLISECONDS = {ms}


def forward(q, k, v, *, scale, causal="none", out=None):
    end = time.perf_counter() + MILLISECONDS / 1000
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if causal == "top_left":
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    result = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    while time.perf_counter() < end:
        pass
    return result if out is None else out.copy_(result)
"""


def git(folder: Path, *words: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
    """What a git command prints, without the configuration of the user who runs the tests."""
    fixed = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    run = subprocess.run(
        ["git", *IDENTITY, *words],
        cwd=folder,
        env={**os.environ, **fixed, **(environment or {})},
        capture_output=True,
        text=True,
        check=check,
        timeout=600,
    )
    return (run.stdout + run.stderr).strip()


def write_timed(folder: Path, milliseconds: float) -> None:
    """Write the variant `mine`, whose calls take this long."""
    home = folder / "kernels" / "mine"
    home.mkdir(parents=True, exist_ok=True)
    (home / "variant.yaml").write_text(PYTHON_MANIFEST, encoding="utf-8")
    (home / "entry.py").write_text(TIMED_SOURCE.format(ms=milliseconds), encoding="utf-8")


def commit(folder: Path, message: str) -> str:
    """Commit all files of a folder, in a new repository if there is none, and return the commit's id."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")
