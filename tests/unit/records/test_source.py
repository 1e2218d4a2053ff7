"""Which commit: git through small repositories, and the stamp that speaks for a copy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pytest_fa.records.record import Source, to_json
from pytest_fa.records.source import STAMP_NAME, make_stamp, read_source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that belongs to no repository, and a git that knows no outer settings."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    made = tmp_path / "source"
    made.mkdir()
    return made


def git(folder: Path, *words: str) -> str:
    """Run git as somebody."""
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    run = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def commit(folder: Path) -> str:
    """Make `folder` a repository with one commit, and return it."""
    git(folder, "init", "-q")
    (folder / "kernel.cu").write_text("", encoding="utf-8")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return git(folder, "rev-parse", "HEAD")


def stamp(folder: Path) -> None:
    """Write the file that says what was copied."""
    told = {"commit": "0123abcd", "dirty": True}
    (folder / STAMP_NAME).write_text(json.dumps(told), encoding="utf-8")


@pytest.mark.parametrize(("change", "dirty"), [(None, False), ("kernel.cu", True), ("new.cu", True)])
def test_git_tells_commit_and_changes(folder: Path, change: str | None, *, dirty: bool) -> None:
    """The commit that is checked out, and whether a tracked or a new file differs from it."""
    head = commit(folder)
    if change is not None:
        (folder / change).write_text("changed", encoding="utf-8")
    assert Source(commit=head, dirty=dirty, origin="git") == read_source(folder)


def test_a_copy_without_git_tells_its_stamp(folder: Path) -> None:
    """A folder that was copied without its repository says what was written before the copy."""
    stamp(folder)
    assert Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) == read_source(folder)


def test_git_comes_before_an_old_stamp(folder: Path) -> None:
    """A repository is asked even where a stamp file lies in it."""
    head = commit(folder)
    stamp(folder)
    assert Source(commit=head, dirty=True, origin="git") == read_source(folder)


@pytest.mark.parametrize("edited", [False, True])
def test_a_stamp_that_fits_comes_before_an_older_checkout(folder: Path, *, edited: bool) -> None:
    """Files that were copied over an older checkout are of the commit that their stamp names, unless they changed."""
    old = commit(folder)
    (folder / "kernel.cu").write_text("newer", encoding="utf-8")
    git(folder, "commit", "-q", "-a", "-m", "second")
    head = git(folder, "rev-parse", "HEAD")
    (folder / STAMP_NAME).write_bytes(to_json(make_stamp(folder, read_source(folder))))
    read_source.cache_clear()
    git(folder, "reset", "-q", "--soft", old)
    if edited:
        (folder / "kernel.cu").write_text("edited", encoding="utf-8")
    expected = Source(old, dirty=True, origin="git") if edited else Source(head, dirty=False, origin=STAMP_NAME)
    assert expected == read_source(folder)


def test_an_edited_copy_is_dirty(folder: Path) -> None:
    """Without git, a file that is no longer what the stamp says is seen."""
    head = commit(folder)
    (folder / STAMP_NAME).write_bytes(to_json(make_stamp(folder, read_source(folder))))
    read_source.cache_clear()
    (folder / ".git").rename(folder.parent / "git")
    (folder / "kernel.cu").write_text("edited", encoding="utf-8")
    assert Source(commit=head, dirty=True, origin=STAMP_NAME) == read_source(folder)


def test_a_stamped_copy_inside_another_repository_tells_its_stamp(folder: Path) -> None:
    """The repository around a copy is not the copy's source."""
    commit(folder)
    copy = folder / "copy"
    copy.mkdir()
    stamp(copy)
    assert Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) == read_source(copy)


UNKNOWN = Source(commit=None, dirty=None, origin="no git commit and no .fa-source.json")


def test_neither_git_nor_stamp_is_said(folder: Path) -> None:
    """Without either the commit is missing, and the origin says why."""
    expected = UNKNOWN
    assert expected == read_source(folder)


@pytest.mark.parametrize("stamped", [True, False])
def test_a_repository_without_a_commit_leaves_the_word_to_the_stamp(folder: Path, *, stamped: bool) -> None:
    """A repository that has nothing to say does not silence the stamp, and is no error without one."""
    git(folder, "init", "-q")
    if stamped:
        stamp(folder)
    expected = Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) if stamped else UNKNOWN
    assert expected == read_source(folder)


@pytest.mark.parametrize("stamped", [True, False])
def test_a_machine_without_git_leaves_the_word_to_the_stamp(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, stamped: bool
) -> None:
    """A repository that nothing can read does not silence the stamp, and is no error without one."""
    commit(folder)
    if stamped:
        stamp(folder)
    monkeypatch.setenv("PATH", "")
    expected = Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) if stamped else UNKNOWN
    assert expected == read_source(folder)
