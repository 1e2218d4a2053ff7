"""The judge computes the truth of a case once for all variants of a run, and no variant reaches it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.host.client import Workers
from tests.factories import PYTHON_SOURCE
from tests.worker_jobs import TINY, JobOfSource

# Imported by every process of the workers: each truth that the store computes adds a line with the process's id.
COUNTS = """\
import os
import pytest_fa.judge.truth_store as store
real = store.truth_of
def counted(*arguments):
    with open({log!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    return real(*arguments)
store.truth_of = counted
"""

# It looks for truth among all objects, and in files that its process could have inherited.
LOOKS_FOR_TRUTH = """\
import gc, os, torch

def forward(q, k, v, *, scale, causal="none", out=None):
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.dtype == torch.float64 and thing.shape == q.shape:
            return out.copy_(thing)
    for name in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{name}")
            if "memfd" in place and os.path.getsize(f"/proc/self/fd/{name}") >= 8 * q.numel():
                data = torch.from_file(f"/proc/self/fd/{name}", size=q.numel(), dtype=torch.float64)
                if data.isfinite().all() and 0.01 < data.std() < 1:
                    return out.copy_(data.view(q.shape))
        except OSError:
            continue
    return out.zero_()
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with a line for each truth; set before the workers start."""
    path = tmp_path / "truths.txt"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNTS.format(log=str(path)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return path


@pytest.fixture
def counting(log: Path) -> Iterator[Workers]:
    """Workers that write that file."""
    assert not log.exists()
    with Workers() as workers:
        yield workers


def lines_of(log: Path) -> list[str]:
    """The judge's process id for each truth."""
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def test_truth_is_computed_once_per_run(counting: Workers, log: Path, job_of_source: JobOfSource) -> None:
    """Three variants, each in a process of its own, are judged by one truth; a new judge computes it again."""
    jobs = [job_of_source(PYTHON_SOURCE) for _ in range(3)]
    assert [counting.run(job).outcome for job in jobs] == ["ok", "ok", "ok"]
    first = lines_of(log)
    assert len(first) == 1
    other = job_of_source(PYTHON_SOURCE, TINY.replace("seed0", "seed1"))
    assert (counting.run(other).outcome, len(lines_of(log))) == ("ok", 2)
    assert counting._judge is not None
    os.kill(counting._judge.pid, signal.SIGKILL)
    assert [counting.run(job).outcome for job in jobs] == ["ok", "ok", "ok"]
    assert len(lines_of(log)) == 3
    assert lines_of(log)[2] != first[0]


def test_a_wrong_variant_is_wrong_by_a_shared_truth(counting: Workers, log: Path, job_of_source: JobOfSource) -> None:
    """After a right variant, a wrong one and one that looks for the judge's truth fail; a right one still passes."""
    sources = (PYTHON_SOURCE, PYTHON_SOURCE.replace("* scale", "* scale * 1.5"), LOOKS_FOR_TRUTH, PYTHON_SOURCE)
    results = [counting.run(job_of_source(source)) for source in sources]
    assert [result.outcome for result in results] == ["ok", "wrong", "wrong", "ok"]
    assert results[0].check == results[3].check
    assert len(lines_of(log)) == 1


def test_timed_calls_have_truths_of_their_own(counting: Workers, log: Path, job_of_source: JobOfSource) -> None:
    """The data of timed calls are new in each job: their truth is neither taken from the store nor kept there."""
    results = [counting.run(job_of_source(PYTHON_SOURCE, time=True)) for _ in range(2)]
    assert [result.outcome for result in results] == ["ok", "ok"]
    assert all(result.speed for result in results)
    assert len(lines_of(log)) == 3  # one of both checks, and one of the timed calls of each job
