"""Notices saves in a thread: the file system's events wake it, and the content of files decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from watchdog import events
from watchdog.observers import Observer

from pytest_fa.build.ninja import end_running
from pytest_fa.errors import FaError
from pytest_fa.features.watch.watched_files import Contents, WatchedFiles, changed_paths, is_scratch
from pytest_fa.host.stop_signal import StopSignal

QUIET_SECONDS = 0.05  # a save is taken as complete when no file has changed for this long
MAX_SECONDS = 1.0  # ...or when files have been changing for this long
LOOK_SECONDS = 5.0  # without an event, for example on a network file system, the files are looked at this often
END_SECONDS = 5.0  # within which the threads end
# Not those of reading: looking at a file would wake the thread again.
WRITES = [
    events.FileCreatedEvent,
    events.FileModifiedEvent,
    events.FileMovedEvent,
    events.FileDeletedEvent,
    events.FileClosedEvent,
]


class SaveWatcher:
    """Compares the content of the watched files with the expected one after every event in their folders.

    When they differ, it sets `stop` and ends the compilers that run.  `say` gets what its thread cannot do.
    """

    def __init__(self, stop: StopSignal, say: Callable[[str], None]) -> None:
        self.stop, self._say = stop, say
        self._lock = threading.Lock()
        self._files, self._expected = WatchedFiles((), (), {}), Contents()
        self._places: tuple[str, ...] = ()
        self._saved: list[str] = []  # the files of the last save
        self._event = StopSignal()  # a file was written, or the thread is to look
        self._has_ended = self._is_waiting = False
        self._observer = Observer()
        self._thread = threading.Thread(target=self._watch, name="fa-watch", daemon=True)
        self._observer.start()
        self._thread.start()

    def expect(self, files: WatchedFiles, contents: Contents) -> None:
        """From now on, watch these files.  A content that differs from `contents` is a save, also an earlier one.

        The signal is taken back; it is set again if there is such a save.  Raises `FaError` if a folder cannot be
        watched.
        """
        with self._lock:
            self._files, self._expected = files, contents
            self.stop.clear()
        if self._places != (places := files.places()):
            self._places = places
            self._observer.unschedule_all()
            for place in places:
                self._schedule(place)
        self._event.set()  # what was saved before the folders were watched

    def wait(self) -> list[str]:
        """Wait for a save and return the paths."""
        self._is_waiting = True
        self._event.set()  # the thread looks once more, when no file changes any longer
        self.stop.wait()
        self._is_waiting = False
        with self._lock:  # a file that was written back since has its old content again
            return changed_paths(self._expected, self._files.contents()) or self._saved

    def close(self) -> None:
        """End the threads.

        Ctrl-C may have interrupted a function of the observer that held a lock, so another thread stops it.
        """
        self._has_ended = True
        self._event.set()
        stopping = threading.Thread(target=self._observer.stop, name="fa-watch-end", daemon=True)
        stopping.start()
        for thread in (stopping, self._thread, self._observer):
            thread.join(END_SECONDS)

    def _schedule(self, place: str) -> None:
        try:
            self._observer.schedule(_Handler(self._event), place, recursive=True, event_filter=WRITES)
        except OSError as problem:
            self._places = ()  # the next `expect` tries again
            text = f"--fa-watch: {place} cannot be watched: {problem}"
            raise FaError(f"{text}; `sysctl fs.inotify` shows the limits of this machine") from None

    def _watch(self) -> None:
        """Look after each group of events; while nothing runs, also every few seconds, should an event be missing."""
        while not self._has_ended:
            is_event = self._event.wait(LOOK_SECONDS)
            if is_event:
                self._settle()
            if is_event or self._is_waiting:
                try:
                    self._look()
                except FaError as problem:
                    self._say(str(problem))

    def _settle(self) -> None:
        """Wait until no event comes any more."""
        deadline = time.monotonic() + MAX_SECONDS
        self._event.clear()
        while self._event.wait(QUIET_SECONDS) and time.monotonic() < deadline and not self._has_ended:
            self._event.clear()

    def _look(self) -> None:
        """Set the signal if the content of a watched file is not the expected one."""
        with self._lock:  # until the compilers are ended, so that these are none of a run that expects the new content
            if paths := changed_paths(self._expected, self._files.contents()):
                self._saved = paths
                self.stop.set()
                end_running()


class _Handler(events.FileSystemEventHandler):
    """Sets an event for each write to a file that is not an editor's own."""

    def __init__(self, event: StopSignal) -> None:
        self._event = event

    def on_any_event(self, event: events.FileSystemEvent) -> None:
        """Take one event of the file system; a rename has two paths."""
        paths = [Path(str(path)) for path in (event.src_path, event.dest_path) if path]
        if not all(is_scratch(path) for path in paths):
            self._event.set()


@contextmanager
def watching_saves(stop: StopSignal, say: Callable[[str], None]) -> Iterator[SaveWatcher]:
    """A watcher whose threads end with the block."""
    watcher = SaveWatcher(stop, say)
    try:
        yield watcher
    finally:
        watcher.close()


def seconds_since_save(paths: list[str]) -> float:
    """The seconds since the newest of these files was written; 0 for files with an old date, such as copied ones."""
    ages = [time.time() - path.stat().st_mtime for path in map(Path, paths) if path.is_file()]
    recent = [age for age in ages if 0 <= age <= MAX_SECONDS + QUIET_SECONDS]
    return min(recent, default=0.0)
