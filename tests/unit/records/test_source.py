"""The commit of a source tree, read from small git repositories and from stamp files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pytest_fa.records.record import Source, to_json
from pytest_fa.records.source import STAMP_NAME, make_stamp, read_source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder outside any repository; git ignores outer repositories and settings."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    source = tmp_path / "source"
    source.mkdir()
    return source


def git(folder: Path, *words: str) -> str:
    """Run git with a fixed user, and return its output."""
    user = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    run = subprocess.run(["git", *user, *words], cwd=folder, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def commit(folder: Path) -> str:
    """Make `folder` a repository with one commit, and return the commit."""
    git(folder, "init", "-q")
    (folder / "kernel.cu").write_text("", encoding="utf-8")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return git(folder, "rev-parse", "HEAD")


def stamp(folder: Path) -> None:
    """Write a stamp file without hashes."""
    content = {"commit": "0123abcd", "dirty": True}
    (folder / STAMP_NAME).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "dirty"),
    [(None, False), ("kernel.cu", True), ("new.cu", True), ("profiles/cpu/mine.jsonl", False), ("profiles.cu", True)],
)
def test_git_gives_commit_and_changes(folder: Path, change: str | None, *, dirty: bool) -> None:
    """It is dirty if a tracked or untracked file differs, but not because a run has saved its results."""
    head = commit(folder)
    if change is not None:
        (folder / change).parent.mkdir(parents=True, exist_ok=True)
        (folder / change).write_text("changed", encoding="utf-8")
    assert Source(commit=head, dirty=dirty, origin="git") == read_source(folder)


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"commit":"\xff","dirty":true}', b'{"commit":"a","dirty":true,"x":' + b"[" * 100_000],
    ids=["cut off", "not UTF-8", "brackets"],
)
def test_a_stamp_that_cannot_be_read_is_named(folder: Path, content: bytes) -> None:
    """A stamp file that cannot be read gives no commit, and the origin says why."""
    (folder / STAMP_NAME).write_bytes(content)
    source = read_source(folder)
    assert (source.commit, source.dirty) == (None, None)
    assert source.origin.startswith(f"{STAMP_NAME} cannot be read: ")


def test_a_copy_without_git_uses_its_stamp(folder: Path) -> None:
    """The source of a folder without a repository is that of its stamp file."""
    stamp(folder)
    assert Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) == read_source(folder)


def test_git_takes_precedence_over_a_stamp_without_hashes(folder: Path) -> None:
    """A repository with a stamp file that has no hashes is read by git."""
    head = commit(folder)
    stamp(folder)
    assert Source(commit=head, dirty=True, origin="git") == read_source(folder)


@pytest.mark.parametrize("edited", [False, True])
def test_a_matching_stamp_takes_precedence_over_an_older_checkout(folder: Path, *, edited: bool) -> None:
    """Files that were copied over an older checkout have the commit of their stamp, unless they were edited."""
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
    """Without git, a copy is dirty if the hash of a file differs from the stamp."""
    head = commit(folder)
    (folder / STAMP_NAME).write_bytes(to_json(make_stamp(folder, read_source(folder))))
    read_source.cache_clear()
    (folder / ".git").rename(folder.parent / "git")
    (folder / "kernel.cu").write_text("edited", encoding="utf-8")
    assert Source(commit=head, dirty=True, origin=STAMP_NAME) == read_source(folder)


def test_a_stamped_copy_inside_another_repository_uses_its_stamp(folder: Path) -> None:
    """For a copy inside another repository, the stamp is used, not that repository."""
    commit(folder)
    copy = folder / "copy"
    copy.mkdir()
    stamp(copy)
    assert Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) == read_source(copy)


UNKNOWN = Source(commit=None, dirty=None, origin="no git commit and no .fa-source.json")


def test_without_git_and_stamp_the_source_is_unknown(folder: Path) -> None:
    """Without a repository and a stamp, the commit is None, and the origin says why."""
    assert read_source(folder) == UNKNOWN


@pytest.mark.parametrize("stamped", [True, False])
def test_in_a_repository_without_a_commit_the_stamp_is_used(folder: Path, *, stamped: bool) -> None:
    """In a repository without a commit, the stamp is used; without a stamp, the source is unknown."""
    git(folder, "init", "-q")
    if stamped:
        stamp(folder)
    expected = Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) if stamped else UNKNOWN
    assert expected == read_source(folder)


@pytest.mark.parametrize("stamped", [True, False])
def test_on_a_machine_without_git_the_stamp_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, stamped: bool
) -> None:
    """If git is not installed, the stamp is used; without a stamp, the source is unknown."""
    commit(folder)
    if stamped:
        stamp(folder)
    monkeypatch.setenv("PATH", "")
    expected = Source(commit="0123abcd", dirty=True, origin=STAMP_NAME) if stamped else UNKNOWN
    assert expected == read_source(folder)
