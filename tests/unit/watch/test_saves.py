"""What counts as a save: another content of a watched file, whatever the file system reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.errors import FaError
from pytest_fa.watch.save_watcher import SaveWatcher, seconds_since_save, watching_saves
from pytest_fa.watch.watched_files import (
    FilesOfVariant,
    WatchedFiles,
    changed_paths,
    flat,
    is_scratch,
    with_known,
)
from pytest_fa.worker.stop_signal import Abandoned, StopSignal

LIMIT_SECONDS = 60.0
UNSEEN_SECONDS = 0.5  # after which an event that counts would have been seen


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of a variant."""
    path = tmp_path / "kernels" / "mine" / "kernel.cu"
    path.parent.mkdir(parents=True)
    path.write_text("one", encoding="utf-8")
    (path.parent / "variant.yaml").write_text("step: one", encoding="utf-8")
    return path


@pytest.fixture
def files(source: Path) -> WatchedFiles:
    """That file and, as for a failed build, every header in its folder."""
    own = FilesOfVariant((str(source),), (str(source.parent),), frozenset({".h"}))
    return WatchedFiles((str(source.parents[1]),), (), {"mine": own})


@pytest.fixture
def watcher(files: WatchedFiles) -> Iterator[SaveWatcher]:
    """A watcher of these files."""
    with watching_saves(StopSignal()) as watcher:
        watcher.expect(files, files.contents())
        yield watcher


def saved(watcher: SaveWatcher) -> list[str]:
    """The names of the files that the watcher reports, within a generous limit."""
    paths: list[str] = []
    thread = threading.Thread(target=lambda: paths.extend(watcher.wait()), daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
    return [Path(path).name for path in paths]


def test_a_new_content_is_a_save(watcher: SaveWatcher, source: Path) -> None:
    """A file that is written anew is reported."""
    source.write_text("two", encoding="utf-8")
    assert ["kernel.cu"] == saved(watcher)


def test_a_rename_over_the_file_is_a_save(watcher: SaveWatcher, source: Path) -> None:
    """An editor may write another file and rename it."""
    other = source.with_name("kernel.cu~")
    other.write_text("two", encoding="utf-8")
    other.replace(source)
    assert ["kernel.cu"] == saved(watcher)


def test_a_deleted_file_is_a_save(watcher: SaveWatcher, source: Path) -> None:
    """A file that is gone has another content, too."""
    source.unlink()
    assert ["kernel.cu"] == saved(watcher)


def test_new_files_where_they_count(watcher: SaveWatcher, source: Path) -> None:
    """A header in a watched folder counts, and a manifest in a folder that is new."""
    source.with_name("new.h").touch()
    assert ["new.h"] == saved(watcher)
    new = source.parents[1] / "other" / "variant.yaml"
    new.parent.mkdir()
    new.touch()
    assert "variant.yaml" in saved(watcher)


def test_what_is_no_save(watcher: SaveWatcher, source: Path) -> None:
    """The same content, files that nothing is built from, and an editor's own files are no save."""
    source.write_text("one", encoding="utf-8")
    for name in ("notes.md", ".kernel.cu.swp", ".new.h", "4913", "kernel.cu~"):
        source.with_name(name).write_text("two", encoding="utf-8")
    time.sleep(UNSEEN_SECONDS)
    assert not watcher.stop.is_set
    source.write_text("two", encoding="utf-8")
    assert ["kernel.cu"] == saved(watcher)


def test_a_save_before_the_watch_counts(watcher: SaveWatcher, files: WatchedFiles, source: Path) -> None:
    """A content that differs from what was judged is a save, also if it was saved earlier."""
    known = with_known(files.contents(), {str(source): "another hash"})
    watcher.expect(files, known)
    assert ["kernel.cu"] == saved(watcher)


def test_a_folder_that_cannot_be_watched(
    watcher: SaveWatcher, files: WatchedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file system refuses, the message names the folder and where the limits are."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr(watcher._observer, "schedule", refuse)
    watcher._places = ()
    with pytest.raises(FaError, match=r"kernels cannot be watched: .*limit reached; `sysctl fs.inotify`"):
        watcher.expect(files, files.contents())


def test_the_threads_end(files: WatchedFiles) -> None:
    """After the block, no thread of the watcher is left."""
    with watching_saves(StopSignal()) as watcher:
        watcher.expect(files, files.contents())
        threads = (watcher._thread, watcher._observer)
    assert [False, False] == [thread.is_alive() for thread in threads]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kernel.cu", False), ("a.h", False), (".a.h.swp", True), ("4913", True), ("a.cu~", True), ("#a.cu#", True)],
)
def test_editors_files_are_known(name: str, expected: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """Swap files, backups and probes of editors do not count."""
    assert expected == is_scratch(Path("kernels/mine") / name)


def test_only_outermost_folders_are_watched(files: WatchedFiles, source: Path) -> None:
    """A folder below a watched one is not watched again."""
    assert (str(source.parents[1].resolve()),) == files.places()


def test_contents_are_compared_by_path(files: WatchedFiles, source: Path) -> None:
    """What differs are the files with another hash, new ones, and those that are gone."""
    before = files.contents()
    source.write_text("two", encoding="utf-8")
    source.with_name("new.h").touch()
    assert [str(source), str(source.with_name("new.h"))] == changed_paths(before, files.contents())
    assert {str(source)} == set(flat(before))


def test_the_age_of_a_save(source: Path) -> None:
    """The clock starts when the file was written; a file with an old date starts it now."""
    import os

    assert 0 <= seconds_since_save([str(source)]) < LIMIT_SECONDS
    os.utime(source, (0, 0))
    assert seconds_since_save([str(source), "gone"]) == 0.0


def test_a_stop_signal_is_seen_and_taken_back() -> None:
    """A signal that was set raises `Abandoned` and is readable, until it is cleared."""
    import select

    stop = StopSignal()
    stop.require_unset()
    stop.set()
    stop.set()
    stop.wait()
    with pytest.raises(Abandoned):
        stop.require_unset()
    assert select.select([stop], [], [], 0)[0] == [stop]
    stop.clear()
    assert (stop.is_set, select.select([stop], [], [], 0)[0]) == (False, [])
    stop.close()
