"""Jobs and results as JSON, and workers that crash, hang, print much output and are replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.host import client, fork_server
from pytest_fa.host.client import WorkerError, Workers
from pytest_fa.records.checks import Bound, Check
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Stage
from pytest_fa.records.timing import Clocks, LaunchedKernel, Speed, Timing
from pytest_fa.server import __main__ as program
from pytest_fa.wire import jobs
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant, cpu_job
from tests.tiers import nightly_after
from tests.worker_jobs import is_running

CASE = "b1h2s64d64-fp16-seed0"
JobOf = Callable[..., CaseJob]

CHECK = Check(
    policy="same_precision",
    passed=False,
    bounds=(Bound("finite", 1.0, 0.0, holds=False), Bound("max", None, 1e-3, holds=False, enforced=False)),
    max_abs_error=None,
    rms_error=1.25e-5,
    same_precision_max_error=1e-4,
    same_precision_rms_error=1e-5,
    nonfinite_count=1,
    bad_count=2,
    element_count=8192,
    first_bad=(0, 1, 2, 3),
    worst=(0, 1, 63, 63),
    worst_got=None,
    worst_want=0.1,
)

SPEED = Speed(
    device=Timing("slope", (1.5, 1.25, 1.0), 1.25, 4000),
    call=Timing("wall clock", (3.0,), 3.0, 200),
    buffers=8,
    exceeds_l2=False,
    launches=(LaunchedKernel("_Z1kv", (8, 1, 1), (128, 1, 1), 49152, 2),),
    launches_missing=None,
    clocks_before=Clocks(1980, 2619, 131.5, 35, 0),
    clocks_after=None,
)


@pytest.fixture
def job_of(write_variant: WriteVariant, tmp_path: Path) -> JobOf:
    """`job_of(lines)`: a job for the CPU, on a variant that executes `lines` and then computes attention.

    A worker imports a variant only once, so a variant with lines has another name (`odd`) than one without (`good`).
    """

    def make(lines: str = "pass", *, name: str = "odd", **fields: Any) -> CaseJob:
        first = "    scores ="
        source = PYTHON_SOURCE.replace(first, f"    {lines}\n{first}", 1)
        name = "good" if lines == "pass" else name
        folder = write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return cpu_job(variant, CASE, **fields)

    return make


# -- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"library": "/cache/kernel.so", "device": "cuda", "policy": "absolute", "time": True, "watchdog_seconds": 0.5},
    ],
)
def test_job_survives_json(job_of: JobOf, fields: dict[str, Any]) -> None:
    """A job that is read back from its JSON equals the original, including its variant and case."""
    job = job_of(**fields)

    assert jobs.decode_job(jobs.encode(job)) == job


@pytest.mark.parametrize(
    "result",
    [
        CaseResult(Outcome.OK, "", (Stage("launch", "ok", 0.25), Stage("correct", "not reached")), speed=SPEED),
        CaseResult(
            Outcome.WRONG, "max error is 1\nsecond line \u00fc", (Stage("correct", "failed", 1.0),), ("max",), CHECK
        ),
        CaseResult(Outcome.FAILED, "an illegal memory access", (), context_lost=True),
    ],
)
def test_result_survives_json(result: CaseResult) -> None:
    """A result that is read back from its JSON equals the original, including every figure and every None."""
    assert jobs.decode_answer(jobs.encode(result)) == result


def test_job_id(job_of: JobOf) -> None:
    """The id of a job consists of variant and case."""
    assert job_of().id == "good-b1h2s64d64-fp16-seed0"


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One server for the tests of this module.  Each test must keep it usable."""
    with pytest.MonkeyPatch.context() as patch, Workers() as started:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        started.start()
        yield started


@pytest.mark.parametrize(
    ("lines", "outcome", "message"),
    [
        ("raise ValueError('a hole')", "failed", "ValueError: a hole (entry.py:LINE)"),
        (
            "import os; os._exit(3)",
            "crashed",
            "crashed: exit status 3 in stage launch; a new worker process replaces this one",
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            "crashed",
            "crashed: SIGSEGV in stage launch; a new worker process replaces this one",
        ),
        (
            "import time; time.sleep(60)",
            "hung",
            "hung: no progress for 1 s in stage launch; the worker process was killed",
        ),
    ],
    ids=["raises", "exits", "segfaults", "hangs"],
)
def test_each_ending_has_its_name(workers: Workers, job_of: JobOf, lines: str, outcome: str, message: str) -> None:
    """A kernel that raises, exits, crashes or hangs fails only its own job, with an outcome of its own."""
    result = workers.run(job_of(lines, watchdog_seconds=1 if outcome == "hung" else 60))
    next_result = workers.run(job_of())

    assert (result.outcome, re.sub(r":\d+\)$", ":LINE)", result.message.splitlines()[0])) == (outcome, message)
    assert (result.stages[0].name, result.stages[0].state) == ("launch", "failed")
    assert (next_result.outcome, next_result.message) == ("ok", "")


def test_sys_exit_is_a_crash(workers: Workers, job_of: JobOf) -> None:
    """`sys.exit` inside a kernel ends its worker, not the server."""
    result = workers.run(job_of("import sys; sys.exit(7)"))
    next_result = workers.run(job_of())

    assert "crashed: exit status 7 in stage launch" in result.message
    assert (result.outcome, next_result.outcome) == ("crashed", "ok")


def test_last_output_of_a_crash(workers: Workers, job_of: JobOf) -> None:
    """The output of a crash is what the worker printed during this job, not during earlier jobs."""
    workers.run(job_of("import os; os.write(2, b'an earlier job')", name="earlier"))
    assert set(workers.take_output().split("an earlier job")) == {"", "\n"}

    workers.run(job_of("import os; os.write(1, b'assertion i < n'); os.write(2, b' failed'); os._exit(1)"))

    assert workers.take_output() == "assertion i < n failed\n"


def test_printed_text_of_a_crash(workers: Workers, job_of: JobOf) -> None:
    """Text that a kernel prints before a crash is not lost in a buffer."""
    workers.take_output()
    workers.run(job_of("import os; print('tile 7 of 8'); os._exit(1)"))

    assert workers.take_output() == "tile 7 of 8\n"


def test_printing_does_not_block(workers: Workers, job_of: JobOf) -> None:
    """A kernel can print megabytes on both streams without blocking: they are written to a file."""
    result = workers.run(
        job_of("import sys; print('x' * 2**22, flush=True); print('y' * 2**22, file=sys.stderr)", watchdog_seconds=30)
    )

    assert result.outcome == "ok"


@pytest.mark.nightly
def test_death_between_jobs_costs_no_job(workers: Workers, job_of: JobOf) -> None:
    """A worker that dies after its job has ended is replaced, and the next job succeeds."""
    dies_later = "import os, threading; threading.Timer(3.0, os._exit, (9,)).start()"
    first = workers.run(job_of(dies_later))
    time.sleep(3.5)

    second = workers.run(job_of())

    assert (first.outcome, second.outcome) == ("ok", "ok"), first.message


def test_lost_context_ends_the_worker(workers: Workers, job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a job that lost the device context, the next job gets a new worker."""
    workers.run(job_of())
    old_pid = workers._candidates[0].pid
    lost = CaseResult(Outcome.FAILED, "an illegal memory access", (), context_lost=True)

    monkeypatch.setattr(client, "decode_answer", lambda _: lost)
    result = workers.run(job_of())
    monkeypatch.undo()
    next_result = workers.run(job_of())

    assert result == lost
    assert next_result.outcome == "ok"
    assert workers._candidates[0].pid != old_pid


def wait_until_gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.nightly
def test_closing_ends_every_process(job_of: JobOf) -> None:
    """After `close` the server and all its workers have ended, including a worker that hung."""
    workers = Workers()
    pids = []
    for job in (job_of("import time; time.sleep(60)", watchdog_seconds=0.5), job_of()):
        workers.start()  # the second call keeps the running server
        workers._processes(("candidate",))
        pids += [candidate.pid for candidate in workers._candidates]
        workers.run(job)
    assert workers._server is not None
    assert workers._judge is not None
    pids += [workers._server.pid, workers._judge.pid]

    workers.close()

    assert len(set(pids)) == 4
    assert [pid for pid in pids if not wait_until_gone(pid)] == []


@pytest.mark.nightly
def test_what_was_let_go_ends_by_itself(job_of: JobOf) -> None:
    """After `let_go` all processes end without `close`; a later job runs on a new server."""
    workers = Workers()
    try:
        assert workers.run(job_of()).outcome == "ok"
        assert workers._server is not None
        assert workers._judge is not None
        server, pids = workers._server.pid, [workers._judge.pid, *(each.pid for each in workers._candidates)]

        workers.let_go()

        assert [pid for pid in pids if not wait_until_gone(pid)] == []
        assert workers.run(job_of()).outcome == "ok"
        assert workers._server.pid != server
    finally:
        workers.close()


def test_a_server_imports_only_what_every_run_needs() -> None:
    """A server imports neither scipy nor the compiler of torch.compile, which take as long as a check."""
    slow = "{'scipy', 'sympy', 'torch._dynamo'}"
    code = f"import sys, pytest_fa.server.process; print(*{slow} & set(sys.modules), end='')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == ""


def test_close_before_start() -> None:
    """`close` of `Workers` that were never started starts no process and raises nothing."""
    workers = Workers()

    workers.close()

    assert workers._server is None


def test_close_kills_an_unused_server() -> None:
    """`close` does not wait for a server that has started no worker and is still importing torch."""
    workers = Workers()
    workers.start()
    assert workers._server is not None
    process = workers._server._process
    assert isinstance(process, subprocess.Popen)

    workers.close()

    assert process.returncode == -signal.SIGKILL


@pytest.mark.nightly
def test_close_kills_a_server_that_does_not_end(job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped is killed after one time limit, and not after two."""
    monkeypatch.setattr(fork_server, "END_SECONDS", 2.0)
    workers = Workers()
    assert workers.run(job_of()).outcome == "ok"
    assert workers._server is not None
    process = workers._server._process
    assert isinstance(process, subprocess.Popen)
    os.kill(process.pid, signal.SIGSTOP)

    start = time.monotonic()
    workers.close()

    assert 2.0 <= time.monotonic() - start < 3.5
    assert process.returncode == -signal.SIGKILL


@pytest.mark.nightly
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_dead_server_does_not_break_the_end(job_of: JobOf, ending: signal.Signals) -> None:
    """After SIGKILL or Ctrl-C to the server, `close` works and no process stays."""
    workers = Workers()
    workers.run(job_of())
    assert workers._server is not None
    assert workers._judge is not None
    pids = [workers._judge.pid, *(candidate.pid for candidate in workers._candidates)]
    os.kill(workers._server.pid, ending)
    time.sleep(0.3)

    workers.close()

    assert [pid for pid in pids if not wait_until_gone(pid)] == []


def test_server_dies_in_a_job(job_of: JobOf) -> None:
    """If server and worker die together, the outcome is `crashed` or `WorkerError` is raised, and no other error."""
    workers = Workers()
    try:
        outcome = workers.run(job_of("import os; os.kill(os.getppid(), 9); os._exit(9)")).outcome
    except WorkerError:
        outcome = Outcome.CRASHED
    finally:
        workers.close()

    assert outcome == "crashed"


def test_a_dead_server_is_replaced(job_of: JobOf) -> None:
    """After a kernel that killed the server, the next job runs on a new server."""
    workers = Workers()
    try:
        first = workers.run(job_of("import os; os.kill(os.getppid(), 9); os._exit(9)"))
        second = workers.run(job_of())
    finally:
        workers.close()
    assert (first.outcome, second.outcome) == ("crashed", "ok")


def test_variants_of_two_folders_share_no_process(workers: Workers, job_of: JobOf) -> None:
    """Process state that one variant changes does not affect a variant of another folder."""
    changes_state = job_of("import builtins; builtins.KEPT = 1")
    reads_state = job_of("import builtins; assert not hasattr(builtins, 'KEPT')", name="other")
    assert [workers.run(job).outcome for job in (changes_state, reads_state)] == ["ok", "ok"]


def test_a_crashing_cross_check_keeps_the_verdict(
    workers: Workers, job_of: JobOf, write_variant: WriteVariant, tmp_path: Path
) -> None:
    """If a cross-check ends the process, the verdict stays and only the diagnosis is lost."""
    source = PYTHON_SOURCE.replace("    scores =", "    import os\n    os._exit(3)\n    scores =", 1)
    folder = write_variant("quitter", manifest=PYTHON_MANIFEST + "role: baseline\n", **{"entry.py": source})
    (cross_check,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    result = workers.run(job_of("scale *= 1.5", cross_checks=(cross_check,)))
    assert (result.outcome, result.check is not None, result.diagnosis) == ("wrong", True, None)
    assert workers.run(job_of()).outcome == "ok"


@pytest.mark.parametrize(
    ("script", "words"), [("echo no module named torch; exit 1", "no module named torch"), ("exit 1", "worker server")]
)
def test_server_that_does_not_start(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    """If no worker can be started, the error quotes the server's own output."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))

    with Workers() as workers, pytest.raises(WorkerError, match="worker server") as raised:
        workers.run(job_of())

    assert words in str(raised.value)


# -- the program ------------------------------------------------------------------------------------------------------


def job_file(folder: Path, job: CaseJob) -> Path:
    """A file that contains the job."""
    path = folder / "job.json"
    path.write_bytes(jobs.encode(job))
    return path


def without_seconds(result: CaseResult) -> CaseResult:
    """The result with a duration of zero for every stage."""
    stages = tuple(msgspec.structs.replace(stage, seconds=0.0) for stage in result.stages)
    return msgspec.structs.replace(result, stages=stages)


@pytest.mark.parametrize(
    ("lines", "outcome", "status"),
    nightly_after(1, [("pass", "ok", 0), ("scale *= 1.5", "wrong", 1)]),
    ids=["ok", "wrong"],
)
def test_program_prints_the_same_result(
    workers: Workers, job_of: JobOf, tmp_path: Path, lines: str, outcome: str, status: int
) -> None:
    """`python -m pytest_fa.server JOB.json` prints the result that a worker returns; its exit status is 0 for ok."""
    job = job_of(lines)
    command = [sys.executable, "-m", "pytest_fa.server", str(job_file(tmp_path, job))]

    process = subprocess.run(command, capture_output=True, text=True, check=False)

    printed = jobs.decode_answer(process.stdout.encode())
    assert isinstance(printed, CaseResult)
    assert (printed.outcome, process.returncode) == (outcome, status)
    assert without_seconds(printed) == without_seconds(workers.run(job))


def test_program_prints_nothing_but_the_result(
    job_of: JobOf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output of a kernel does not mix with the result on standard output."""
    status = program.main([str(job_file(tmp_path, job_of("print('hello')")))])

    assert status == 0
    printed = jobs.decode_answer(capfd.readouterr().out.encode())
    assert isinstance(printed, CaseResult)
    assert printed.outcome == "ok"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["a.json", "b.json"], ["--serve"]])
def test_program_with_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """For wrong arguments the program returns 2 and prints its usage."""
    status = program.main(arguments)

    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert "python -m pytest_fa.server JOB.json" in printed.err


@pytest.mark.parametrize("content", [None, "{}", "no JSON"], ids=["no file", "no job", "no JSON"])
def test_program_with_an_unusable_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    """For a file that is no job the program returns 2 and prints the file's name, not a traceback."""
    path = tmp_path / "job.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    status = program.main([str(path)])

    assert status == 2
    assert str(path) in capsys.readouterr().err
