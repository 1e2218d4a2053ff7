"""Workers that several tests of a module share, and jobs of one-file Python variants."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.host.client import Workers
from pytest_fa.wire.jobs import CaseJob
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

JobOfSource = Callable[..., CaseJob]
JobOfLines = Callable[..., CaseJob]
TINY = "b1h1s64d64-fp16-seed0"

# The judge's process id: that of the other child of the server.  A process may end while the others are listed.
FIND_JUDGE = """\
import ctypes, os, time
def parent_of(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return int(file.read().rpartition(')')[2].split()[1])
    except OSError:
        return None
me, server = os.getpid(), os.getppid()
(judge,) = [pid for pid in map(int, filter(str.isdigit, os.listdir('/proc'))) if pid != me and parent_of(pid) == server]
"""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One server for the tests of a module.  Each test must keep it usable.  Without torch, they are skipped."""
    if find_spec("torch") is None:
        pytest.skip("this environment has no torch")
    with Workers() as started:
        started.start()
        yield started


@pytest.fixture
def job_of_source(tmp_path: Path, write_variant: WriteVariant) -> JobOfSource:
    """Return a function that makes a job of a variant with this source; `changes` are other fields of the job."""
    numbers = iter(range(100))

    def make(source: str, case: str = TINY, **changes: Any) -> CaseJob:
        folder = write_variant(f"entry_{next(numbers)}", manifest=PYTHON_MANIFEST, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        job = CaseJob(variant, parse_case(case), None, "cpu", "same_precision", checks_output=True, time=False)
        return msgspec.structs.replace(job, **{"watchdog_seconds": 5.0, **changes})

    return make


@pytest.fixture
def job_of_lines(job_of_source: JobOfSource) -> JobOfLines:
    """Return a function that makes a job of a variant whose call first runs these lines; `changes` as above."""

    def make(lines: str, **changes: Any) -> CaseJob:
        body = "".join(f"    {line}\n" for line in lines.splitlines())
        source = PYTHON_SOURCE.replace("    scores =", f"{body}    scores =", 1)
        return job_of_source(source, "b1h2s64d64-fp16-seed0", **changes)

    return make


def is_running(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
