"""The operators of a call are listed although TMPDIR is full or unusable, and without memory files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from pytest_fa.candidate import delegated


def no_memory_files(_name: str) -> int:
    """Refuse to make a memory file, as some sandboxes do."""
    raise PermissionError


def listed() -> tuple[str, ...]:
    """The operators of a softmax."""
    return delegated.operators_of(lambda: torch.softmax(torch.ones(2, 2), -1))


def test_no_temporary_folder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace is in memory: a folder for temporary files that cannot be used does not matter."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert "aten::softmax" in listed()


def test_without_memory_files_one_in_tmpdir_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sandbox may have no memory files; then TMPDIR must have room."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(delegated, "memfd_create", no_memory_files)
    assert "aten::softmax" in listed()
