"""A run with `--fa-watch` in a terminal of its own, whose text a test waits for."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.projects import Project, inner_environment

LIMIT_SECONDS = 180.0  # on a machine on which much else runs
VERDICT = r"fa: (correct|built|not correct: [^,]+|not run: [^,]+), [0-9.]+ s after the save\n"


def save_at_once(path: Path, text: str) -> None:
    """Save a file as editors do that replace it, so that a busy machine shows no empty file for a while."""
    new = path.parents[2] / "being-saved"  # outside the folder of the variants
    new.write_text(text, encoding="utf-8")
    new.replace(path)


class WatchedRun:
    """pytest in a pseudo-terminal.  `text` is everything that it has written so far."""

    def __init__(self, project: Project, *arguments: str) -> None:
        command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_fa.suite", "--fa-watch", *arguments]
        fixed = {"XDG_CACHE_HOME": str(project.cache), "COLUMNS": "120", "PY_COLORS": "0", "TERM": "dumb"}
        environment = {**inner_environment(), **fixed, "PYTEST_FA_SERVER": project.server}
        self._terminal, inner_end = pty.openpty()
        self._process = subprocess.Popen(
            command,
            cwd=project.folder,
            env=environment,
            stdin=inner_end,
            stdout=inner_end,
            stderr=inner_end,
            start_new_session=True,
        )
        os.close(inner_end)
        self._data, self.text = b"", ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._terminal)

    def until(self, pattern: str, *, after: int = 0) -> str:
        """Wait until the text after a place has this pattern, and return what it matched.  Fails at the limit."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while (match := re.search(pattern, self.text[after:])) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text}"
            assert self._read(), f"ended without {pattern!r}:\n{self.text}"
        return match[0]

    def started(self) -> Self:
        """Wait until the first run has ended and the files are watched."""
        self.until(r"fa: watching .* Ctrl-C ends\n")
        return self

    def until_exists(self, folder: Path, pattern: str) -> Path:
        """Wait until the run has written a file with this pattern, and return its path.  Fails at the limit."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (paths := list(folder.glob(pattern))):
            assert time.monotonic() < deadline, f"no {pattern} in {folder}:\n{self.text}"
            assert self.is_running, self.text
        return paths[0]

    def saved(self, path: Path, text: str, *, at_once: bool = False) -> str:
        """Save a file, wait for the verdict, and return everything that was written since."""
        place = len(self.text)
        if at_once:
            save_at_once(path, text)
        else:
            path.write_text(text, encoding="utf-8")
        self.until(VERDICT, after=place)
        return self.text[place:]

    def interrupt(self) -> int:
        """Press Ctrl-C, wait for the end, and return the exit status."""
        os.killpg(self._process.pid, signal.SIGINT)
        return self.ended()

    @property
    def is_running(self) -> bool:
        """Whether pytest still runs; its text is read meanwhile."""
        return self._read() and self._process.poll() is None

    def ended(self) -> int:
        """Wait for the end, and return the exit status."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self._read():
            assert time.monotonic() < deadline, self.text
        return self._process.wait(LIMIT_SECONDS)

    def _read(self) -> bool:
        """Read what there is, for at most a second.  False if the process has closed its terminal."""
        if not select.select([self._terminal], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._terminal, 2**16)
        except OSError:  # Linux: no process has the other end open any more
            return False
        self._data += data  # a read may end between the two characters that end a line
        self.text = self._data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
