"""What counts as a save: another content of a watched file, whatever the file system reports."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_fa.errors import FaError
from pytest_fa.features.watch import save_watcher, watched_files
from pytest_fa.features.watch.save_watcher import SaveWatcher, seconds_since_save, watching_saves
from pytest_fa.features.watch.watched_files import (
    FilesOfVariant,
    WatchedFiles,
    changed_paths,
    flat,
    is_scratch,
    with_known,
)
from pytest_fa.host.stop_signal import Abandoned, StopSignal

LIMIT_SECONDS = 60.0


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


class Looks:
    """Counts how often the watcher's thread has compared the files."""

    def __init__(self) -> None:
        self._begun = self._ended = 0
        self._changed = threading.Condition()

    def counted(self, look: Callable[[SaveWatcher], None]) -> Callable[[SaveWatcher], None]:
        """The method `look`, whose calls are counted."""

        def counted_look(watcher: SaveWatcher) -> None:
            self._begun += 1
            look(watcher)
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

        return counted_look

    def after(self, wake: Callable[[], None]) -> None:
        """Wake the thread, and wait until a look has ended that began later."""
        number = self._begun
        wake()
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended > number, LIMIT_SECONDS)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """The looks of all watchers of a test."""
    looks = Looks()
    monkeypatch.setattr(SaveWatcher, "_look", looks.counted(SaveWatcher._look))
    return looks


@pytest.fixture
def watcher(files: WatchedFiles, looks: Looks) -> Iterator[SaveWatcher]:
    """A watcher of these files, which will look again only after an event."""
    with watching_saves(StopSignal(), print) as watcher:
        looks.after(lambda: watcher.expect(files, files.contents()))
        yield watcher


def saved(watcher: SaveWatcher) -> list[str]:
    """The names of the files that the watcher reports.  `wait` would look by itself, so the signal must come first."""
    assert select.select([watcher.stop], [], [], LIMIT_SECONDS)[0]
    return [Path(path).name for path in watcher.wait()]


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


def test_new_files_where_they_count(watcher: SaveWatcher, files: WatchedFiles, source: Path, looks: Looks) -> None:
    """A header in a watched folder counts, a manifest in a folder that is new, and a new `planted.yaml`."""
    source.with_name("new.h").touch()
    assert ["new.h"] == saved(watcher)
    looks.after(lambda: watcher.expect(files, files.contents()))
    assert not watcher.stop.is_set
    new = source.parents[1] / "other" / "variant.yaml"
    new.parent.mkdir()
    new.touch()
    assert ["variant.yaml"] == saved(watcher)
    looks.after(lambda: watcher.expect(files, files.contents()))
    source.with_name("planted.yaml").touch()
    assert ["planted.yaml"] == saved(watcher)


def test_what_is_no_save(watcher: SaveWatcher, source: Path, looks: Looks) -> None:
    """The same content, files that nothing is built from, and an editor's own files are no save."""
    source.write_text("one", encoding="utf-8")
    for name in ("notes.md", ".kernel.cu.swp", ".new.h", "4913", "kernel.cu~"):
        source.with_name(name).write_text("two", encoding="utf-8")
    looks.after(watcher._event.set)
    assert not watcher.stop.is_set
    source.write_text("two", encoding="utf-8")
    assert ["kernel.cu"] == saved(watcher)


def test_a_save_that_is_undone_keeps_its_name(watcher: SaveWatcher, source: Path) -> None:
    """If the old content is back when the save is answered, the file is named all the same."""
    source.write_text("two", encoding="utf-8")
    assert select.select([watcher.stop], [], [], LIMIT_SECONDS)[0]
    source.write_text("one", encoding="utf-8")
    assert ["kernel.cu"] == saved(watcher)


def test_a_new_run_is_not_ended_for_the_save_that_it_answers(
    watcher: SaveWatcher, files: WatchedFiles, source: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the compilers are ended, the new content cannot be expected; when it is, the signal is taken back."""
    is_held = list[bool]()
    monkeypatch.setattr(save_watcher, "end_running", lambda: is_held.append(watcher._lock.locked()))
    source.write_text("two", encoding="utf-8")
    looks.after(watcher._event.set)
    looks.after(lambda: watcher.expect(files, files.contents()))
    assert {True} == set(is_held)
    assert not watcher.stop.is_set


def test_a_folder_may_vanish_while_it_is_listed(files: WatchedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are looked at again if a folder has vanished."""
    expected, rglob, problems = files.contents(), Path.rglob, [FileNotFoundError(2, "gone")]

    def vanishing(folder: Path, pattern: str) -> Iterator[Path]:
        if problems:
            raise problems.pop()
        return rglob(folder, pattern)

    monkeypatch.setattr(Path, "rglob", vanishing)
    assert expected == files.contents()
    assert not problems


def test_the_thread_survives_what_it_cannot_read(
    files: WatchedFiles, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the files cannot be listed, the watcher says why, and notices the next save."""
    said: queue.Queue[str] = queue.Queue()

    def refuse(*_: object) -> Iterator[Path]:
        raise OSError(5, "Input/output error")

    with watching_saves(StopSignal(), said.put) as watcher:
        contents = files.contents()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rglob", refuse)
            patch.setattr(watched_files, "BETWEEN_LOOKS_SECONDS", 0.0)
            watcher.expect(files, contents)
            assert "cannot be listed: [Errno 5] Input/output error" in said.get(timeout=LIMIT_SECONDS)
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
    with watching_saves(StopSignal(), print) as watcher:
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
