"""Whether a failure says something about the machine and not about the kernel: a full disk, or a limit of the shell.

A kernel that fails while a folder is full was not judged.  Such a test fails with one sentence and without a record, so
that nothing is said about the kernel; no failure becomes a pass.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record

MIN_FREE_BYTES = 2**20  # of a folder for temporary files; a trace of a call is smaller
FAILURES = (Outcome.FAILED, Outcome.CRASHED, Outcome.HUNG, Outcome.LAUNCH_FAILED)
DISK_WORDS = ("No space left on device", "Disk quota exceeded")
FILE_SIZE_WORDS = ("File too large",)
MEMORY_WORDS = (
    "Cannot allocate memory",
    "MemoryError",
    "not enough memory",
    "can't allocate memory",
    "failed to map segment",
    "bad_alloc",
    "can't start new thread",
    "Resource temporarily unavailable",
)
IMPORT_ERRORS = ("ModuleNotFoundError: ", "ImportError: ", "OSError: ")


def machine_problem(record: Record, folders: Iterable[Path]) -> str:
    """Return why this machine could not judge the variant of a failed record; empty if the failure is its own."""
    may_be_machine = record.outcome in FAILURES or "delegation" in record.caught_by
    message = record.message  # not the output, in which a kernel may print anything
    if not may_be_machine or not (reason := limit_problem(message) or full_folder(message, folders)):
        return ""
    return f"{record.id} was not judged: {reason}"


def full_folder(text: str, folders: Iterable[Path]) -> str:
    """Return which of the folders, or of those for temporary files, is full, or that the text says that one is."""
    for folder in dict.fromkeys([*temporary_folders(), *folders]):
        free_bytes = _free_bytes(folder)
        if free_bytes is not None and free_bytes < MIN_FREE_BYTES:
            return f"{folder} is full ({free_bytes // 1024} KB are free); make room there, or use another folder"
    words = next((words for words in DISK_WORDS if words in text), "")
    line = next((line.strip() for line in text.splitlines() if words and words in line), "")
    return f"a disk is full: {line}" if line else ""


def temporary_folders() -> list[Path]:
    """The folder for temporary files; none if no folder can be used."""
    try:
        return [Path(tempfile.gettempdir())]
    except OSError:
        return []


def limit_problem(text: str) -> str:
    """Return which limit of this process explains an error message; empty if none does."""
    for limit, words, option, what in (
        (resource.RLIMIT_FSIZE, FILE_SIZE_WORDS, "-f", "files"),
        (resource.RLIMIT_AS, MEMORY_WORDS, "-v", "the memory of a process"),
        (resource.RLIMIT_DATA, MEMORY_WORDS, "-d", "the memory of a process"),
        (resource.RLIMIT_NPROC, MEMORY_WORDS[-2:], "-u", "processes"),
    ):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and any(each in text for each in words):
            amount = f"{most}" if limit == resource.RLIMIT_NPROC else f"{most // 1024} KB"
            return f"ulimit {option} limits {what} to {amount}, which is too little here"
    return ""


def torch_problem(text: str) -> str:
    """Return that torch cannot be imported, if the output of processes that do not start ends with that error."""
    last_line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    is_import = last_line.startswith(IMPORT_ERRORS) and ("import torch" in text or "'torch'" in last_line)
    is_machine = bool(limit_problem(text) or full_folder(text, ()))  # which is why it cannot be loaded
    return without_torch(last_line) if is_import and not is_machine else ""


def without_torch(error: str) -> str:
    """Return what a user without a working torch is told, and what to type."""
    return (
        f"torch cannot be imported ({error}), so no kernel can run: type `pip install torch`; "
        "`python -m pytest_fa doctor` says what else is missing"
    )


def start_problem(text: str) -> str:
    """Return one sentence about worker processes that do not start, from the error and the end of their output."""
    if problem := torch_problem(text):
        return problem
    first_line, *lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    reason = limit_problem(text) or full_folder(text, ())
    last_line = f" ({lines[-1]})" if lines else ""
    return f"{first_line.rstrip(':')}{last_line}{f': {reason}' if reason else ''}"


def _free_bytes(folder: Path) -> int | None:
    """What a user may still write to the disk of a folder, or of the first folder above it that exists.

    None for a disk that is read only, whose free space means nothing.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    is_written_to = state.f_blocks and not state.f_flag & os.ST_RDONLY
    return state.f_bavail * state.f_frsize if is_written_to else None
