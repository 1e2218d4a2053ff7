"""The sentences about a kernels folder without variants: what they recommend, and that their commands can be typed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from pytest_fa.catalog.kernels_folder import absence, how_to_make


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, whose parent `with blanks` has a kernels folder with a variant."""
    manifest = tmp_path / "with blanks" / "kernels" / "mine" / "variant.yaml"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    start = tmp_path / "with blanks" / "sub"
    start.mkdir()
    monkeypatch.chdir(start)
    return start


def test_variants_nearby_are_named(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names a folder that has variants, and the command for it; a path with a blank is quoted."""
    folder = start.parent / "kernels"
    text = absence((start / "kernels",), "mine", ("pytest", "-x"))
    assert f"{folder} has variants: `pytest -x --fa-kernels=../kernels --fa-variant=mine`" in text
    monkeypatch.chdir(start.parent.parent)
    text = absence((Path("kernels").absolute(),), "", ("pytest",))
    assert f"{folder} has variants: `pytest '--fa-kernels=with blanks/kernels'`" in text


def test_variants_of_another_user_are_not_recommended(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that belongs to another user is not named: its kernels would run with the rights of this one."""
    other_user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other_user)
    text = absence((start / "kernels",), "mine", ("pytest",))
    assert (text.count(str(start / "kernels")), "has variants" in text) == (2, False)


@pytest.mark.parametrize("name", ["kernels", "more kernels", "it's"])
def test_the_command_can_be_typed(start: Path, name: str) -> None:
    """The command that writes a variant names exactly the folder, also with a blank or a quote in its path."""
    folder = start / name
    command = how_to_make("mine", folder).split("`")[1]
    options = [] if name == "kernels" else [f"--kernels={folder}"]
    assert shlex.split(command) == ["python", "-m", "pytest_fa", "new", "mine", *options]
