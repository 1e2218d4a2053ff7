"""Jobs and results as JSON, and workers that crash, hang, shout and are replaced."""

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

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.records.judged import Bound, Check
from pytest_fa.records.record import Stage
from pytest_fa.records.timing import Clocks, LaunchedKernel, Speed, Timing
from pytest_fa.worker import __main__ as program
from pytest_fa.worker import client, jobs
from pytest_fa.worker.client import WorkerError, Workers
from pytest_fa.worker.jobs import CaseJob, CaseResult
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

CASE = "b1h2s64d64-fp16-seed0"
JobOf = Callable[..., CaseJob]

CHECK = Check(
    policy="same_precision",
    passed=False,
    bounds=(Bound("finite", 1.0, 0.0, holds=False), Bound("max", None, 1e-3, holds=False, judged=False)),
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
    """`job_of(lines)`: a job for the CPU, on a variant that does what `lines` say and then what is right.

    A worker imports a variant once, so each kind of lines is a variant of its own: `odd`, or `good` without any.
    """

    def make(lines: str = "pass", *, name: str = "odd", **fields: Any) -> CaseJob:
        first = "    scores ="
        source = PYTHON_SOURCE.replace(first, f"    {lines}\n{first}", 1)
        name = "good" if lines == "pass" else name
        folder = write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        plain = CaseJob(
            variant=variant,
            case=parse_case(CASE),
            library=None,
            device="cpu",
            policy="same_precision",
            judge=True,
            time=False,
        )
        return msgspec.structs.replace(plain, **fields)

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
    """A job read back from its JSON is the same job, variant and case included."""
    job = job_of(**fields)

    assert jobs.decode_job(jobs.encode(job)) == job


@pytest.mark.parametrize(
    "result",
    [
        CaseResult("ok", "", (Stage("launch", "ok", 0.25), Stage("correct", "not reached")), speed=SPEED),
        CaseResult("wrong", "max error is 1\nsecond line \u00fc", (Stage("correct", "failed", 1.0),), ("max",), CHECK),
        CaseResult("failed", "an illegal memory access", (), context_lost=True),
    ],
)
def test_result_survives_json(result: CaseResult) -> None:
    """A result read back from its JSON is the same result, with every figure and every None."""
    assert jobs.decode_answer(jobs.encode(result)) == result


def test_job_id(job_of: JobOf) -> None:
    """A job is named by variant and case."""
    assert job_of().id == "good-b1h2s64d64-fp16-seed0"


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One server for the tests of this module: each must leave it usable."""
    with pytest.MonkeyPatch.context() as patch, Workers() as running:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        running.start()
        yield running


def bury(running: Workers) -> None:
    """Close what `close` left open, so that a test that fails leaves nothing to the next one."""
    for each in (running._control, running._log):
        if each is not None:
            each.close()
    if running._server is not None:
        running._server.kill()
        running._server.wait()


@pytest.mark.parametrize(
    ("lines", "outcome", "message"),
    [
        ("raise ValueError('a hole')", "failed", "ValueError: a hole (entry.py:LINE)"),
        (
            "import os; os._exit(3)",
            "crashed",
            "its worker died in stage launch (exit status 3); a new one takes over",
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            "crashed",
            "its worker died in stage launch (SIGSEGV); a new one takes over",
        ),
        (
            "import time; time.sleep(60)",
            "hung",
            "no sign of life for 1 s in stage launch; its worker was killed",
        ),
    ],
    ids=["raises", "exits", "segfaults", "hangs"],
)
def test_each_ending_has_its_name(workers: Workers, job_of: JobOf, lines: str, outcome: str, message: str) -> None:
    """A kernel that raises, exits, crashes or hangs costs its own job, says which it was, and the next job succeeds."""
    result = workers.run(job_of(lines, watchdog_seconds=1))
    after = workers.run(job_of())

    assert (result.outcome, re.sub(r":\d+\)$", ":LINE)", result.message)) == (outcome, message)
    assert (result.stages[0].name, result.stages[0].state) == ("launch", "failed")
    assert (after.outcome, after.message) == ("ok", "")


def test_sys_exit_is_a_crash(workers: Workers, job_of: JobOf) -> None:
    """`sys.exit` inside a kernel ends its worker, not the server."""
    result = workers.run(job_of("import sys; sys.exit(7)"))
    after = workers.run(job_of())

    assert "died in stage launch (exit status 7)" in result.message
    assert (result.outcome, after.outcome) == ("crashed", "ok")


def test_last_words_of_a_crash(workers: Workers, job_of: JobOf) -> None:
    """What a worker wrote before it died is in the message, without what earlier jobs wrote."""
    workers.run(job_of("import os; os.write(2, b'an earlier job')", name="earlier"))

    result = workers.run(job_of("import os; os.write(1, b'assertion i < n'); os.write(2, b' failed'); os._exit(1)"))

    assert result.message.splitlines()[1:] == ["its last words:", "assertion i < n failed"]


def test_printed_words_of_a_crash(workers: Workers, job_of: JobOf) -> None:
    """What a kernel printed before a crash is not lost in a buffer."""
    result = workers.run(job_of("import os; print('tile 7 of 8'); os._exit(1)"))

    assert "tile 7 of 8" in result.message


def test_printing_does_not_block(workers: Workers, job_of: JobOf) -> None:
    """Megabytes on both streams go to a file: nobody has to read them for the kernel to go on."""
    result = workers.run(
        job_of("import sys; print('x' * 2**22, flush=True); print('y' * 2**22, file=sys.stderr)", watchdog_seconds=30)
    )

    assert result.outcome == "ok"


def test_death_between_jobs_costs_no_job(workers: Workers, job_of: JobOf) -> None:
    """A worker that dies after it has answered is replaced before the next job, which is not to blame."""
    last_act = "import os, threading; threading.Timer(3.0, os._exit, (9,)).start()"
    first = workers.run(job_of(last_act))
    time.sleep(3.5)

    after = workers.run(job_of())

    assert (first.outcome, after.outcome) == ("ok", "ok"), first.message


def test_lost_context_ends_the_worker(workers: Workers, job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a job that lost the device context, the next one gets a worker of its own."""
    workers.run(job_of())
    assert workers._worker is not None
    before = workers._worker[0]
    lost = CaseResult("failed", "an illegal memory access", (), context_lost=True)

    monkeypatch.setattr(client, "decode_answer", lambda _: lost)
    result = workers.run(job_of())
    monkeypatch.undo()
    after = workers.run(job_of())

    assert result == lost
    assert after.outcome == "ok"
    assert workers._worker[0] != before


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.1)
    return False


def test_closing_leaves_no_process(job_of: JobOf) -> None:
    """After `close` neither the server nor any of its workers is left, one that hung included."""
    running = Workers()
    pids = []
    for job in (job_of("import time; time.sleep(60)", watchdog_seconds=0.5), job_of()):
        running.start()  # again: it keeps the server that runs
        pids += [running._fork()[0]]
        running.run(job)
    assert running._server is not None
    pids += [running._server.pid]

    running.close()

    assert len(set(pids)) == 3
    assert [pid for pid in pids if not wait_until_gone(pid)] == []


def test_close_before_start() -> None:
    """Workers that were never needed start nothing and close without a word."""
    idle = Workers()

    idle.close()

    assert idle._server is None


def test_a_server_that_nobody_asked_is_not_waited_for() -> None:
    """A run in which nothing was to be run does not stay for torch, which its server is importing."""
    unasked = Workers()
    unasked.start()
    server = unasked._server
    assert server is not None

    unasked.close()

    assert server.returncode == -signal.SIGKILL


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_dead_server_does_not_break_the_end(job_of: JobOf, ending: signal.Signals) -> None:
    """A server that was killed, or that got the terminal's Ctrl-C, leaves a `close` that works and no process."""
    running = Workers()
    running.run(job_of())
    assert running._server is not None
    assert running._worker is not None
    pid = running._worker[0]
    os.kill(running._server.pid, ending)
    time.sleep(0.3)

    try:
        running.close()
    finally:
        bury(running)

    assert wait_until_gone(pid)


def test_server_dies_in_a_job(job_of: JobOf) -> None:
    """Where server and worker die together, the job has crashed or no worker can be had; no other error comes out."""
    running = Workers()
    try:
        outcome = running.run(job_of("import os; os.kill(os.getppid(), 9); os._exit(9)")).outcome
    except WorkerError:
        outcome = "crashed"
    finally:
        bury(running)

    assert outcome == "crashed"


def test_a_dead_server_is_replaced(job_of: JobOf) -> None:
    """After a kernel that took the server down, the next job is run by a new one."""
    running = Workers()
    try:
        first = running.run(job_of("import os; os.kill(os.getppid(), 9); os._exit(9)"))
        after = running.run(job_of())
    finally:
        bury(running)
    assert (first.outcome, after.outcome) == ("crashed", "ok")


def test_leftovers_are_not_held_against_another(workers: Workers, job_of: JobOf) -> None:
    """What one variant does to its process is gone when a variant of another folder runs."""
    spoilt = job_of("torch.set_default_device('meta')")
    assert [workers.run(each).outcome for each in (spoilt, spoilt, job_of())] == ["ok", "failed", "ok"]


def test_a_verdict_stands_when_a_witness_takes_the_worker_down(
    workers: Workers, job_of: JobOf, write_variant: WriteVariant, tmp_path: Path
) -> None:
    """A cross-check that ends its process costs the diagnosis, not the verdict."""
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
    """Where no worker can be had at all, the error says so with the server's own words."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))

    with Workers() as running, pytest.raises(WorkerError, match="worker server") as caught:
        running.run(job_of())

    assert words in str(caught.value)


# -- the program ------------------------------------------------------------------------------------------------------


def job_file(folder: Path, job: CaseJob) -> Path:
    """A file that holds the job."""
    path = folder / "job.json"
    path.write_bytes(jobs.encode(job))
    return path


def without_seconds(result: CaseResult) -> CaseResult:
    """The result with all stages at zero seconds."""
    stages = tuple(msgspec.structs.replace(stage, seconds=0.0) for stage in result.stages)
    return msgspec.structs.replace(result, stages=stages)


@pytest.mark.parametrize(
    ("lines", "outcome", "status"), [("pass", "ok", 0), ("scale *= 1.5", "wrong", 1)], ids=["ok", "wrong"]
)
def test_program_prints_the_same_result(
    workers: Workers, job_of: JobOf, tmp_path: Path, lines: str, outcome: str, status: int
) -> None:
    """`python -m pytest_fa.worker JOB.json` prints what a worker gives, and its exit status says whether it was ok."""
    job = job_of(lines)
    command = [sys.executable, "-m", "pytest_fa.worker", str(job_file(tmp_path, job))]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    printed = jobs.decode_answer(ended.stdout.encode())
    assert isinstance(printed, CaseResult)
    assert (printed.outcome, ended.returncode) == (outcome, status)
    assert without_seconds(printed) == without_seconds(workers.run(job))


def test_program_prints_nothing_but_the_result(
    job_of: JobOf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a kernel prints does not mix with the result on standard output."""
    status = program.main([str(job_file(tmp_path, job_of("print('hello')")))])

    assert status == 0
    printed = jobs.decode_answer(capfd.readouterr().out.encode())
    assert isinstance(printed, CaseResult)
    assert printed.outcome == "ok"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["a.json", "b.json"], ["--serve"]])
def test_program_with_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Other arguments end with 2 and the two ways to call it."""
    status = program.main(arguments)

    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert "python -m pytest_fa.worker JOB.json" in printed.err


@pytest.mark.parametrize("content", [None, "{}", "no JSON"], ids=["no file", "no job", "no JSON"])
def test_program_with_an_unusable_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    """A file that holds no job is a wrong argument: 2 and its name, not a stack trace."""
    path = tmp_path / "job.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    status = program.main([str(path)])

    assert status == 2
    assert str(path) in capsys.readouterr().err
