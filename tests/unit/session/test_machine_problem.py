"""A failure on a full disk or under a limit of the shell is named as such, and never as the kernel's."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fa.records.outcome import Outcome
from pytest_fa.session import machine_problem as module
from pytest_fa.session.machine_problem import limit_problem, machine_problem, start_problem
from tests.factories import record

ID = record().id
TEMPORARY = "/usr"  # any folder that exists; nothing is written there
READ_ONLY = "/proc"  # the same


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that are free in each folder; a folder that is not named has plenty."""
    free: dict[str, int] = {}
    flags = {READ_ONLY: os.ST_RDONLY}

    def statvfs(path: Any) -> Any:
        return SimpleNamespace(
            f_bavail=free.get(str(path), 2**30), f_frsize=1, f_blocks=1, f_flag=flags.get(str(path), 0)
        )

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(module, "temporary_folders", lambda: [Path(TEMPORARY)])
    return free


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The limits of this process; those that are not named are infinite."""
    limits: dict[int, int] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (limits.get(limit, resource.RLIM_INFINITY),) * 2)
    return limits


def problem_of(message: str, outcome: Outcome = Outcome.FAILED, *folders: Path, caught_by: tuple[str, ...] = ()) -> str:
    """The problem of the machine with a record of this outcome."""
    return machine_problem(record(outcome=outcome, message=message, caught_by=caught_by), folders)


@pytest.mark.parametrize("outcome", ["failed", "crashed", "hung", "launch_failed"])
def test_a_full_folder_is_named(free: dict[str, int], tmp_path: Path, outcome: Outcome) -> None:
    """Whatever failed: if a folder to which a run writes is full, the sentence names it."""
    assert problem_of("DecodeError: Input data was truncated", outcome, tmp_path) == ""
    free[TEMPORARY] = 64 * 1024
    full = f"{ID} was not judged: {TEMPORARY} is full (64 KB are free); make room there, or use another folder"
    assert problem_of("DecodeError: Input data was truncated", outcome, tmp_path) == full
    free[TEMPORARY] = 2**30
    free[str(tmp_path)] = 0
    assert f"{tmp_path}/artifacts is full (0 KB are free)" in problem_of("anything", outcome, tmp_path / "artifacts")


def test_a_disk_that_is_read_only_is_not_full(free: dict[str, int]) -> None:
    """The disk of an image has no free space, and nothing is written there."""
    free[READ_ONLY] = 0
    assert problem_of("DecodeError: Input data was truncated", Outcome.FAILED, Path(READ_ONLY)) == ""


@pytest.mark.parametrize("outcome", ["wrong", "cheat", "not_built", "build_changed", "unsupported", "ok"])
def test_other_outcomes_stay(free: dict[str, int], outcome: Outcome) -> None:
    """A wrong output is wrong on a full disk, too."""
    free[TEMPORARY] = 0
    assert problem_of("No space left on device", outcome) == ""


def test_the_delegation_check_needs_room(free: dict[str, int]) -> None:
    """A call that fails beside torch's other attention is not delegation if a folder is full."""
    free[TEMPORARY] = 0
    assert f"{TEMPORARY} is full" in problem_of("it fails in a process ...", Outcome.WRONG, caught_by=("delegation",))


def test_a_disk_without_a_known_folder_is_named() -> None:
    """A message that says itself that a disk is full is passed on."""
    message = "Traceback:\n  OSError: [Errno 28] No space left on device: '/data/triton'\n"
    sentence = "a disk is full: OSError: [Errno 28] No space left on device: '/data/triton'"
    assert problem_of(message) == f"{ID} was not judged: {sentence}"


@pytest.mark.parametrize(
    ("limit", "most", "message", "sentence"),
    [
        (resource.RLIMIT_FSIZE, 8192, "OSError: [Errno 27] File too large", "ulimit -f limits files to 8 KB"),
        (resource.RLIMIT_AS, 600 << 20, "MemoryError", "ulimit -v limits the memory of a process to 614400 KB"),
        (resource.RLIMIT_AS, 600 << 20, "libx.so: failed to map segment from shared object", "ulimit -v limits"),
        (resource.RLIMIT_DATA, 600 << 20, "[Errno 12] Cannot allocate memory", "ulimit -d limits"),
        (resource.RLIMIT_NPROC, 3, "RuntimeError: can't start new thread", "ulimit -u limits processes to 3"),
    ],
)
def test_a_limit_is_named(limits: dict[int, int], limit: int, most: int, message: str, sentence: str) -> None:
    """An error that a limit explains names the limit; without one, the failure is the kernel's."""
    assert problem_of(message) == ""
    limits[limit] = most
    assert problem_of(message).startswith(f"{ID} was not judged: {sentence}")
    assert problem_of("ValueError: a hole") == limit_problem("ValueError: a hole") == ""


def test_a_server_that_does_not_start_is_one_sentence(limits: dict[int, int]) -> None:
    """The sentence has the error, the last line of the output, and the limit that explains it."""
    limits[resource.RLIMIT_AS] = 600 << 20
    output = "Traceback (most recent call last):\n  import torch\nImportError: x.so: failed to map segment\n"
    text = f"the worker server ended before it started a worker:\n{output}"
    assert start_problem(text) == (
        "the worker server ended before it started a worker (ImportError: x.so: failed to map segment): "
        "ulimit -v limits the memory of a process to 614400 KB, which is too little here"
    )
    assert start_problem("") == ""
