"""Disassembles the device code of builds while their host code is compiled.

nvcc first writes the cubin, then the fatbin, which has the same code.  It compiles the host code after that, or at the
same time.  The host compilation takes about as long as nvdisasm.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from elftools.common.exceptions import ELFError

from pytest_fa.build.command import device_folder
from pytest_fa.build.machine_code import Disassembly, disassemble
from pytest_fa.build.ninja import parallel_jobs

LOOK_SECONDS = 0.05  # between two looks for new fatbins


class EarlyDisassembly:
    """The cubins of staging folders, disassembled as soon as they are complete."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._waiting = set(folders)
        self._pool = ThreadPoolExecutor(parallel_jobs())
        self._futures: dict[Path, list[Future[Disassembly]]] = {}
        self._has_ended, self._looking = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fa-disassembly", daemon=True)
        self._thread.start()

    def of(self, folder: Path) -> list[Disassembly]:
        """The disassembled cubins of a folder; none if that failed, or if its compiler kept no cubin.

        Afterwards, the folder is not looked at again.
        """
        with self._looking:
            self._waiting.discard(folder)
            futures = self._futures.get(folder, [])
        disassembled = []
        for future in futures:
            try:
                disassembled.append(future.result())
            except (OSError, subprocess.SubprocessError, ValueError, KeyError, ELFError):
                continue  # the library is disassembled later, which says why it cannot be
        return disassembled

    def stop_looking(self) -> None:
        """Look for no further fatbins: the compilers have ended."""
        self._has_ended.set()
        self._thread.join()

    def close(self) -> None:
        """Cancel what has not begun, and do not wait for what runs: its result is not needed."""
        self.stop_looking()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._has_ended.wait(LOOK_SECONDS):
            with self._looking:
                self._look()

    def _look(self) -> None:
        for folder in [each for each in self._waiting if any(device_folder(each).glob("*.fatbin"))]:
            self._waiting.remove(folder)
            cubins = [path for path in device_folder(folder).glob("*.cubin") if not path.stem.endswith("_dlink")]
            self._futures[folder] = [self._pool.submit(disassemble, cubin) for cubin in cubins]


@contextmanager
def disassembling_early(folders: Iterable[Path]) -> Iterator[EarlyDisassembly]:
    """Disassemble the cubins of these staging folders while the block runs."""
    early = EarlyDisassembly(folders)
    try:
        yield early
    finally:
        early.close()
