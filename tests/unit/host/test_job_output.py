"""What a worker printed: the part of the log that belongs to a job, its end only, and as printable text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.host.client import Workers
from pytest_fa.host.job_output import MAX_OUTPUT_BYTES, JobOutput, OutputTail
from pytest_fa.wire.jobs import CaseJob
from tests.worker_jobs import JobOfLines


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IO[bytes]]:
    """A log that holds the output of an earlier job."""
    with (tmp_path / "log").open("w+b", buffering=0) as stream:
        stream.write(b"earlier\n")
        yield stream


@pytest.fixture
def job_of(job_of_lines: JobOfLines) -> JobOfLines:
    """Return a function that makes a job of a variant whose call first runs these lines."""

    def make(lines: str, watchdog_seconds: float = 60.0) -> CaseJob:
        return job_of_lines(f"import ctypes, os, sys, time\n{lines}", watchdog_seconds=watchdog_seconds)

    return make


# -- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (b"", ""),
        (b"two\nlines\n", "two\nlines\n"),
        (b"from Windows\r\n", "from Windows\n"),
        (b"\x1b[2J\x07\rover", r"\x1b[2J\x07\x0dover"),
        (b"\xff\xfe caf\xc3\xa9", "\\xff\\xfe caf\u00e9"),
        ("\u202egnp.exe".encode(), r"\u202egnp.exe"),
    ],
    ids=["nothing", "lines", "CRLF", "escapes", "no UTF-8", "bidirectional"],
)
def test_text_of_a_job(log: IO[bytes], written: bytes, text: str) -> None:
    """The text is what was written after the job began, with escapes for what a terminal would act on."""
    output = JobOutput(log.fileno())
    log.write(written)
    assert output.text() == text


def test_a_long_output_keeps_its_end(log: IO[bytes]) -> None:
    """Of a long output the last lines are kept, at most 64 KiB, and the first line counts the bytes left out."""
    output = JobOutput(log.fileno())
    lines = [b"line %07d\n" % number for number in range(10**5)]
    log.write(b"".join(lines))
    first, *kept = output.text().splitlines()
    left_out = 13 * (10**5 - len(kept))
    assert first == f"({left_out} bytes of output before this line are left out)"
    assert (len(kept), kept[-1]) == (MAX_OUTPUT_BYTES // 13, "line 0099999")


def test_a_truncated_log(log: IO[bytes]) -> None:
    """If a variant empties the log, what it wrote after that is its output."""
    output = JobOutput(log.fileno())
    log.truncate(0)
    log.seek(0)
    log.write(b"new\n")
    assert output.text() == "new\n"


def test_live_lines_are_complete(log: IO[bytes]) -> None:
    """Live output comes in complete lines, each once; the end of the job also shows an incomplete one."""
    shown: list[str] = []
    output = JobOutput(log.fileno(), shown.append)
    for part in (b"one\ntw", b"o\n", b"", b"three"):
        log.write(part)
        output.show_new()
    output.show_new(is_last=True)
    assert shown == ["one\n", "two\n", "three"]


def test_outputs_of_several_jobs_are_bounded(snapshot: SnapshotAssertion) -> None:
    """The outputs of a test's jobs are joined; the first line counts the characters that were left out."""
    tail = OutputTail()
    for text in ("first", "", "second\n"):
        tail.add(text)
    assert (tail.take(), tail.take()) == ("first\nsecond\n", "")
    for _ in range(3):
        tail.add("x" * 40_000)
    first, second = tail.take().splitlines()
    assert snapshot == first
    assert second == "x" * 40_000


# -- of a worker ------------------------------------------------------------------------------------------------------


def test_each_job_has_its_own_output(workers: Workers, job_of: JobOfLines) -> None:
    """Text of Python, of C and of a child process belongs to the job in which it was printed."""
    first = "print('first'); ctypes.CDLL(None).printf(b'C without a newline '); os.system('echo a child')"
    workers.run(job_of(first))
    first_output = workers.take_output()
    workers.run(job_of("print('second', file=sys.stderr)"))
    assert set(first_output.splitlines()) <= {"first", "C without a newline ", "a child", "C without a newline a child"}
    assert all(word in first_output for word in ("first", "C without a newline", "a child"))
    assert set(workers.take_output().splitlines()) == {"second"}
    assert workers.take_output() == ""


@pytest.mark.parametrize("ending", ["os._exit(3)", "os.abort()", "time.sleep(60)"], ids=["exits", "aborts", "hangs"])
def test_output_of_a_lost_worker(workers: Workers, job_of: JobOfLines, ending: str) -> None:
    """What was printed before a crash or a hang is kept: Python's text, and C's, also without a newline."""
    watchdog_seconds = 2.0 if "sleep" in ending else 60.0
    lines = f"print('Python'); ctypes.CDLL(None).printf(b'and C'); {ending}"
    outcome = workers.run(job_of(lines, watchdog_seconds)).outcome
    assert (outcome in ("crashed", "hung"), workers.take_output()) == (True, "Python\nand C\n")
    workers.run(job_of("pass"))
    assert workers.take_output() == ""


def test_ten_megabytes(workers: Workers, job_of: JobOfLines) -> None:
    """A job that prints 10 MB passes, and the end of its output is kept."""
    result = workers.run(job_of("for _ in range(10**5): print('x' * 99)"))
    first, *kept = workers.take_output().splitlines()
    assert (result.outcome, first.endswith("are left out)"), set(kept)) == ("ok", True, {"x" * 99})
    assert sum(len(line) + 1 for line in kept) <= MAX_OUTPUT_BYTES


def test_live_output_comes_while_the_job_runs(workers: Workers, job_of: JobOfLines, tmp_path: Path) -> None:
    """Lines are shown before the job has ended: it prints the second one when the first one was shown."""
    shown: list[str] = []
    is_shown = tmp_path / "is_shown"

    def show(text: str) -> None:
        shown.append(text)
        is_shown.touch()

    workers.show_live = show
    try:
        wait = f"while not os.path.exists({str(is_shown)!r}): time.sleep(0.01)"
        workers.run(job_of(f"print('tick')\n{wait}\nprint('tock')"))
    finally:
        workers.show_live = None
    assert shown[0] == "tick\n"  # the job calls its variant twice: the call that is judged, and the delegation check
    assert "".join(shown) == "tick\ntock\n" * 2
