"""Ninja: special characters in names, failed and successful jobs, dependencies, progress, logs."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_fa.build import ninja
from pytest_fa.build.ninja import CompileJob, end_running, run_jobs, seconds_of
from pytest_fa.errors import ToolchainError

WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); print('wrote', sys.argv[2])"


def job(stage: Path, folder: str, *, text: str = "done", after: str | None = None, code: str = WRITE) -> CompileJob:
    """Return a job that writes `text` to `<folder>/out.txt`."""
    (stage / folder).mkdir(parents=True, exist_ok=True)
    return CompileJob(folder, "out.txt", (sys.executable, "-c", code, "out.txt", text), f"title of {folder}", after)


def run(stage: Path, *jobs: CompileJob) -> None:
    """Run the jobs without progress messages."""
    run_jobs(stage, list(jobs), lambda *_: None)


@pytest.mark.parametrize("name", ["plain", "two words", "$HOME", "$$", "a:b", "it's", "a&b;c", "#1"])
@pytest.mark.parametrize("where", ["stage", "folder", "text"])
def test_odd_names(tmp_path: Path, name: str, where: str) -> None:
    """Spaces and special characters of ninja and the shell are handled in paths and arguments."""
    stage = tmp_path / (name if where == "stage" else "stage")
    folder = name if where == "folder" else "0"
    text = name if where == "text" else "done"

    run(stage, job(stage, folder, text=text))

    assert (stage / folder / "out.txt").read_text(encoding="utf-8") == text
    assert (stage / folder / "log.txt").read_text(encoding="utf-8") == f"wrote {text}\n"
    assert seconds_of(stage, folder) > 0


def test_failing_job_does_not_stop_the_others(tmp_path: Path) -> None:
    """All other jobs run, and the log of the failed job has its output."""
    bad = job(tmp_path, "0", code="import sys; sys.exit('no luck')")
    jobs = [bad, *(job(tmp_path, str(index)) for index in range(1, 6))]

    run(tmp_path, *jobs)

    assert [(tmp_path / started.folder / "out.txt").exists() for started in jobs] == [False] + [True] * 5
    assert (tmp_path / "0" / "log.txt").read_text(encoding="utf-8") == "no luck\n"


def test_seconds_of_what_succeeded(tmp_path: Path) -> None:
    """The seconds of a successful job can be read by its folder; a failed job has none."""
    slow = job(tmp_path, "slow", code=f"import time; time.sleep(0.2); {WRITE}")
    failing = job(tmp_path, "failing", code="import sys; sys.exit(1)")

    run(tmp_path, slow, failing)

    assert 0.2 <= seconds_of(tmp_path, "slow") < 5
    assert seconds_of(tmp_path, "failing") == 0


def test_job_waits_for_its_dependency(tmp_path: Path) -> None:
    """A job with `after` runs when the other job's output exists."""
    first = job(tmp_path, "first", code=f"import time; time.sleep(0.2); {WRITE}", text="made first")
    second = job(
        tmp_path,
        "second",
        after="first/out.txt",
        code="import shutil, sys; shutil.copy('../first/out.txt', sys.argv[1])",
    )

    run(tmp_path, second, first)

    assert (tmp_path / "second" / "out.txt").read_text(encoding="utf-8") == "made first"


def test_job_does_not_run_after_a_failed_dependency(tmp_path: Path) -> None:
    """If the first job fails, the job that depends on it is not started."""
    first = job(tmp_path, "first", code="import sys; sys.exit(1)")
    second = job(tmp_path, "second", after="first/out.txt")

    run(tmp_path, first, second)

    assert not (tmp_path / "second" / "out.txt").exists()
    assert not (tmp_path / "second" / "log.txt").exists()


def test_progress(tmp_path: Path) -> None:
    """`say` is called for each job that ends, with the number done, the total and its title."""
    messages: list[tuple[int, int, str]] = []

    run_jobs(
        tmp_path,
        [job(tmp_path, "0"), job(tmp_path, "1", after="0/out.txt")],
        lambda done, total, title: messages.append((done, total, title)),
    )

    assert messages == [(1, 2, "title of 0"), (2, 2, "title of 1")]


def test_running_jobs_can_be_ended(tmp_path: Path) -> None:
    """Another thread can end the jobs that run, which then have no output; later batches are not affected."""
    code = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(600)"
    slow = job(tmp_path / "slow", "0", code=code)
    batch = threading.Thread(target=run, args=(tmp_path / "slow", slow))
    batch.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "slow" / "0" / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    end_running()
    batch.join(60)
    assert (batch.is_alive(), (tmp_path / "slow" / "0" / "out.txt").exists()) == (False, False)
    run(tmp_path, job(tmp_path, "1"))
    assert (tmp_path / "1" / "out.txt").exists()


def test_ninja_itself_fails(tmp_path: Path) -> None:
    """If ninja refuses the build file, the error has ninja's output."""
    duplicate = job(tmp_path, "0")

    with pytest.raises(ToolchainError, match=r"(?s)^ninja ran nothing: .*multiple rules generate 0/out\.txt"):
        run(tmp_path, duplicate, duplicate)


@pytest.mark.parametrize(
    ("cores", "free_kb", "jobs"), [(64, 2**30, 64), (64, 8 * 2**20, 4), (2, 2**20, 1), (1, 2**30, 1)]
)
def test_parallel_jobs(monkeypatch: pytest.MonkeyPatch, cores: int, free_kb: int, jobs: int) -> None:
    """One compiler per core, at most one per 2 GiB of available memory, and at least one."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"MemTotal: 1 kB\nMemAvailable:   {free_kb} kB\n")

    assert ninja.parallel_jobs() == jobs
