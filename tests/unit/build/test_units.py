"""The text of a failed compilation names the user's files, where an editor finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.build.units import with_own_paths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("src/kernel.cu(16): error: expected", "kernels/mine/kernel.cu:16: error: expected"),
        ("src/tile.h:3:5: error: expected", "kernels/mine/tile.h:3:5: error: expected"),
        ("src/../../csrc/a.cpp:7:1: error", "csrc/a.cpp:7:1: error"),
        ('1 error detected in the compilation of "src/kernel.cu".', None),
        ("/opt/src/kernel.cu(16): error", "/opt/src/kernel.cu(16): error"),
        ("src/absent.cu(16): error", "src/absent.cu(16): error"),
        ("In file included from src/kernel.cu:1:", "In file included from kernels/mine/kernel.cu:1:"),
    ],
)
def test_paths_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str | None) -> None:
    """Paths below the link to the variant's folder are relative to the working folder, with the line behind a colon."""
    for name in ("kernels/mine/kernel.cu", "kernels/mine/tile.h", "csrc/a.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    whole = expected or '1 error detected in the compilation of "kernels/mine/kernel.cu".'
    assert with_own_paths(text, tmp_path / "kernels" / "mine") == whole
