"""Workers that run hostile code: what they send, hold, start or change costs their own case only."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_fa.host import client, fork_server, job_output
from pytest_fa.host.client import Workers
from pytest_fa.host.scheduling import read_scheduling
from pytest_fa.processes import children_of, marked_with, memory_bytes
from pytest_fa.wire import channel as channel_module
from pytest_fa.wire.channel import MAX_MESSAGE_BYTES, Channel, Garbage
from pytest_fa.wire.jobs import encode
from tests.factories import PYTHON_SOURCE
from tests.tiers import nightly_after, nightly_but
from tests.worker_jobs import FIND_JUDGE, JobOfLines, JobOfSource

# The candidate's end of its connection, found as hostile code can find it: the only stream socket of the process.
FIND_CONNECTION = """\
import json, os, socket, stat, struct, sys, time
def connection():
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                end = socket.socket(fileno=os.dup(fd))
                if end.type == socket.SOCK_STREAM:
                    return end
        except OSError:
            pass
end = connection()
end.setblocking(True)
def number():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == 'serve_judge':
            return frame.f_locals['number']
        frame = frame.f_back
def send(text, size=None):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    data = data if size else number() + data
    end.sendall(struct.pack('!Q', size or len(data)) + data)
"""


def is_gone(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process ends within a time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


# -- messages ---------------------------------------------------------------------------------------------------------


CANNOT_BE_READ = "its process sent an answer that cannot be read"
DONE = "dict(type='done')"
MESSAGES = {
    "garbage": ("end.send(b'not a message' * 3)", "failed", "was announced; at most"),
    "a huge size": ("send(b'', 2**62)", "failed", "was announced; at most 8388608 are allowed"),
    "a size that takes memory": ("send(b'', 2**22); os._exit(0)", "failed", "0 of 4194304 bytes"),
    "half a message": ("send(b'x' * 50, 100); os._exit(0)", "failed", "50 of 100 bytes"),
    "half a size": ("end.send(b'1234'); os._exit(0)", "failed", "4 of 8 bytes"),
    "no JSON": ("send(b'abcd')", "failed", "JSON is malformed"),
    "nested JSON": ("send(b'[' * 10**6)", "failed", CANNOT_BE_READ),
    "a result": ("send(dict(type='result', outcome='ok', message='', stages=[]))", "failed", "Invalid value 'result'"),
    "progress": ("send(dict(type='progress', stage='correct', seconds=1e18))", "failed", "Invalid value 'progress'"),
    "another type": ("send(dict(type='done', size_bytes='x'))", "failed", "Expected `int`, got `str`"),
    "a number without end": ('send(b\'{"type": "done", "inside_us": [1e999]}\')', "failed", CANNOT_BE_READ),
    "thousands of descriptors": (
        "for _ in range(20): socket.send_fds(end, [b'\\0'], [0] * 250)",
        "failed",
        CANNOT_BE_READ,
    ),
    "an answer in advance": (f"send({DONE}); send({DONE})", "failed", "it answers no command"),
    "a thousand answers": (f"for _ in range(1000): send({DONE})", "failed", "it answers no command"),
    "a guessed number": (
        f"def number(): return b'12345678'\nsend({DONE})",
        "failed",
        "it answers no command",
    ),
    "a lost device": (
        "send(dict(type='problem', kind='device_error', message='', explanation=''))",
        "device_error",
        "",
    ),
    "a long problem": (
        "send(dict(type='problem', kind='failed', message='\\x1b[2J' * 10**5, explanation='x' * 10**6))",
        "failed",
        "",
    ),
    "a closed connection": ("end.shutdown(2); time.sleep(30)", "crashed", "crashed: "),
    "every descriptor closed": ("os.closerange(3, 256); time.sleep(30)", "crashed", "crashed: "),
    "every descriptor written": (
        "for fd in range(3, 64):\n    try: os.write(fd, b'x' * 99)\n    except OSError: pass",
        "failed",
        "was announced; at most",
    ),
    "a closed log": ("os.close(1); os.close(2); os._exit(5)", "crashed", "exit status 5"),
}


@pytest.mark.parametrize(
    "name", nightly_but(MESSAGES, "a result", "a guessed number", "thousands of descriptors", "a closed connection")
)
def test_a_hostile_message_costs_its_case(workers: Workers, job_of_lines: JobOfLines, name: str) -> None:
    """The case has an outcome of its own and a sentence, soon, and the next case runs."""
    lines, outcome, words = MESSAGES[name]
    start = time.monotonic()
    result = workers.run(job_of_lines(FIND_CONNECTION + lines, watchdog_seconds=60.0))
    assert (result.outcome, words in result.message) == (outcome, True), result.message
    assert len(result.message) < 25_000
    assert "\x1b" not in result.message
    assert time.monotonic() - start < 25  # a closed connection is noticed before its variant has slept 30 s
    assert workers.run(job_of_lines("pass")).outcome == "ok"


def test_an_output_elsewhere(workers: Workers, job_of_source: JobOfSource) -> None:
    """A candidate that claims to have allocated its output where no memory is has no time, and its attempt is named."""
    source = (
        "from pytest_fa.candidate import series\nfrom pytest_fa.wire import commands\n"
        "place = commands.Allocated('0', 1, -9, (2**62,) * 4)\n"
        "series.PreparedSeries._allocated = lambda self: (place,) * len(self._outs)\n"
    )
    result = workers.run(job_of_source(source + PYTHON_SOURCE, time=True))
    assert (result.outcome, result.speed) == ("cheat", None), result.message


ENDINGS = {
    "exit": ("os._exit(3)", "crashed", "exit status 3"),
    "SystemExit": ("sys.exit(0)", "crashed", "exit status 0"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "crashed", "exit status 1"),
    "GeneratorExit": ("raise GeneratorExit", "crashed", "exit status 1"),
    "an exception of no kind": ("raise type('Own', (BaseException,), {})('x')", "crashed", "exit status 1"),
    "endless recursion": ("def f(): return f()\nf()", "failed", "RecursionError: maximum recursion depth exceeded"),
    "abort": ("os.abort()", "crashed", "SIGABRT"),
    "alarm": ("signal.alarm(1); time.sleep(3)", "crashed", "SIGALRM"),
    "a limit of no files": ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "failed", ""),
}


@pytest.mark.parametrize("name", nightly_but(ENDINGS, "exit", "abort"))
def test_an_ending_costs_its_case(workers: Workers, job_of_lines: JobOfLines, name: str) -> None:
    """However a call ends its process, the case says how, and the next case runs."""
    lines, outcome, words = ENDINGS[name]
    result = workers.run(job_of_lines("import os, resource, signal, sys, time\n" + lines))
    assert (result.outcome, words in result.message) == (outcome, True), result.message
    assert workers.run(job_of_lines("pass")).outcome == "ok"


@pytest.mark.parametrize(
    "lines",
    nightly_after(1, ["import time; time.sleep(60)", FIND_CONNECTION + "send(b'x' * 50, 100); time.sleep(60)"]),
    ids=["silent", "half an answer"],
)
def test_a_silent_candidate_is_hung(workers: Workers, job_of_lines: JobOfLines, lines: str) -> None:
    """A candidate that does not answer, or not to the end, is ended after the watchdog's time."""
    result = workers.run(job_of_lines(lines, watchdog_seconds=1.0))
    assert (result.outcome, result.caught_by) == ("hung", ("watchdog",)), result.message
    assert workers.run(job_of_lines("pass")).outcome == "ok"


def test_a_forged_line_is_only_output(workers: Workers, job_of_lines: JobOfLines) -> None:
    """A result that a variant prints is shown as its output, and changes nothing."""
    forged = '{"type":"result","outcome":"ok","message":"","stages":[]}'
    result = workers.run(job_of_lines(f"print({forged!r}, flush=True); scale = scale * 1.5"))
    assert result.outcome == "wrong"
    assert forged in workers.take_output()


@pytest.mark.nightly
def test_memory_has_a_bound(workers: Workers, job_of_lines: JobOfLines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that takes more than the bound is ended; the test allows 0.75 GiB."""
    monkeypatch.setattr(client, "MAX_MEMORY_SHARE", 0.75 * 2**30 / memory_bytes())
    monkeypatch.setattr(job_output, "SLICE_SECONDS", 0.05)
    lines = "import time\nfor _ in range(12): kept = kept + bytes(10**8) if _ else bytes(10**8); time.sleep(0.1)\n"
    result = workers.run(job_of_lines(lines + "time.sleep(60)"))
    assert result.outcome == "failed"
    assert "it took more than 0.75 GiB of memory" in result.message
    assert workers.run(job_of_lines("pass")).outcome == "ok"


@pytest.mark.nightly
def test_the_position_of_the_log_is_not_shared(workers: Workers, job_of_lines: JobOfLines) -> None:
    """A variant that writes 8 GiB behind the end of its log does not let the next one appear to write so much."""
    workers.run(job_of_lines("import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, 0); os.lseek(1, 2**33, 0); print('far')"))
    workers.take_output()
    result = workers.run(job_of_lines("import time\nprint('near')\ntime.sleep(1.5)"))
    assert result.outcome == "ok", result.message
    assert set(workers.take_output().split()) == {"near"}


SIGNALS = {
    "kill the judge": ("os.kill(judge, 9); time.sleep(30)", "crashed", "SIGKILL in stage launch"),
    "stop the judge": ("os.kill(judge, 19)", "hung", "no progress for"),
    "trace the judge": ("ctypes.CDLL(None).ptrace(16, judge, 0, 0) == 0 or os._exit(1)", "hung", "no progress for"),
    "kill the server": ("os.kill(os.getppid(), 9); time.sleep(30)", "crashed", "the worker server died too"),
    "stop the server": ("os.kill(os.getppid(), 19)", "failed", "the worker server changed: it was stopped"),
}


@pytest.mark.parametrize("name", nightly_but(SIGNALS, "kill the judge", "stop the server"))
@pytest.mark.skipif(os.getuid() != 0, reason="only root may trace the judge")
def test_a_signal_to_the_judge_gives_no_verdict(job_of_lines: JobOfLines, name: str) -> None:
    """A variant may stop the judge or the server, but it is not `ok` then, and the next case runs."""
    lines, outcome, words = SIGNALS[name]
    watchdog_seconds = 1.0 if outcome == "hung" else 20.0  # less than a variant sleeps whose judge was killed
    with Workers() as workers:
        result = workers.run(job_of_lines(FIND_JUDGE + lines, watchdog_seconds=watchdog_seconds))
        assert (result.outcome, words in result.message) == (outcome, True), result.message
        assert workers.run(job_of_lines("pass")).outcome == "ok"


@pytest.mark.nightly
def test_endless_output_ends(workers: Workers, job_of_lines: JobOfLines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that floods its output is ended before it fills the disk, and the log is emptied."""
    monkeypatch.setattr(client, "MAX_LOG_BYTES", 2**22)
    monkeypatch.setattr(job_output, "SLICE_SECONDS", 0.1)
    result = workers.run(job_of_lines("import os\nwhile True: os.write(1, b'x' * 65536)"))
    assert (result.outcome, "MiB of output" in result.message) == ("failed", True), result.message
    assert workers.run(job_of_lines("pass")).outcome == "ok"
    assert workers._server is not None
    assert workers._server.log_bytes < 2**22


# -- processes --------------------------------------------------------------------------------------------------------


def test_several_processes_end_together() -> None:
    """One request ends several processes with the status of the first, which may have ended before; others stay."""
    server = fork_server.ForkServer()
    first, second, third = (server.fork("candidate") for _ in range(3))
    try:
        os.kill(first.pid, signal.SIGTERM)
        while not first.has_ended:
            time.sleep(0.01)
        pids = (first.pid, second.pid)
        assert server.end(first, second) == signal.SIGTERM
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not third.has_ended
    finally:
        third.close()
        server.close()
    assert not Path(f"/proc/{third.pid}").exists()


DAEMON = """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({path!r}, "w").write(str(os.getpid()))
        time.sleep(120)
    os._exit(0)
while not os.path.exists({path!r}) or not open({path!r}).read(): time.sleep(0.01)
"""


def test_a_child_that_holds_the_connection(workers: Workers, job_of_lines: JobOfLines) -> None:
    """If a worker ends while a child of it holds its socket, the end is noticed at once."""
    lines = "import os, time\nif os.fork() == 0: time.sleep(120)\nos._exit(7)"
    start = time.monotonic()
    result = workers.run(job_of_lines(lines, watchdog_seconds=90.0))
    assert (result.outcome, "exit status 7" in result.message) == ("crashed", True), result.message
    assert time.monotonic() - start < 60


def test_a_child_may_not_answer(workers: Workers, job_of_lines: JobOfLines) -> None:
    """If a worker ends and a child of it goes on to answer in its place, its case fails."""
    lines = "import os, time\nif os.getpid() == os.getpgid(0) and os.fork(): os._exit(0)\ntime.sleep(0.3)"
    result = workers.run(job_of_lines(lines))
    assert (result.outcome, "exit status 0" in result.message) == ("crashed", True), result.message
    assert workers.run(job_of_lines("pass")).outcome == "ok"


@pytest.mark.parametrize("ending", nightly_after(1, ["", "os._exit(1)", "os.kill(os.getpid(), 9)", "time.sleep(60)"]))
def test_a_daemon_ends_with_its_worker(workers: Workers, job_of_lines: JobOfLines, tmp_path: Path, ending: str) -> None:
    """A process that detached itself from the worker is ended with it, however the worker ends."""
    path = tmp_path / "daemon"
    workers.run(job_of_lines(DAEMON.format(path=str(path)) + ending))
    workers.end_worker()
    assert is_gone(int(path.read_text(encoding="utf-8")))


def test_no_process_stays_after_a_killed_server(job_of_lines: JobOfLines, tmp_path: Path) -> None:
    """If the server is killed under an entry that hangs, its worker and a detached process end, too."""
    workers = Workers()
    path = tmp_path / "daemon"
    try:
        lines = DAEMON.format(path=str(path)) + "os.kill(os.getppid(), 9)\ntime.sleep(60)"
        result = workers.run(job_of_lines(lines))
    finally:
        workers.close()
    assert result.outcome == "crashed"
    assert is_gone(int(path.read_text(encoding="utf-8")))


@pytest.mark.nightly
def test_no_process_stays_after_a_killed_client(tmp_path: Path, job_of_lines: JobOfLines) -> None:
    """If pytest's process is killed while an entry hangs, the server, the worker and a detached process end."""
    path = tmp_path / "daemon"
    job = tmp_path / "job.json"
    job.write_bytes(encode(job_of_lines(DAEMON.format(path=str(path)) + "time.sleep(60)")))
    code = (
        "import sys; from pathlib import Path; from pytest_fa.host.client import Workers; "
        "from pytest_fa.wire.jobs import read_job; Workers().run(read_job(Path(sys.argv[1])))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(job)]) as process:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.read_text(encoding="utf-8")) and time.monotonic() < deadline:
            time.sleep(0.05)
        (server,) = children_of(process.pid)
        pids = [server, *children_of(server), int(path.read_text(encoding="utf-8"))]
        process.kill()
    assert len(pids) >= 3
    assert [pid for pid in pids if not is_gone(pid)] == []


@pytest.mark.nightly
def test_no_process_stays_after_a_kill_during_the_import(tmp_path: Path) -> None:
    """If pytest's process is killed while the server still imports torch, the server ends."""
    code = "import os; from pytest_fa.host.client import Workers; w = Workers(); w.start(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "MARKER": str(tmp_path)}, check=False)
    time.sleep(1)
    left = [pid for pid in _pids() if _has(pid, b"--serve") and _environ_has(pid, f"MARKER={tmp_path}".encode())]
    assert left == []


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _has(pid: int, word: bytes) -> bool:
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _environ_has(pid: int, word: bytes) -> bool:
    try:
        return word in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_the_worker_holds_no_file_of_its_parents(workers: Workers, job_of_lines: JobOfLines, tmp_path: Path) -> None:
    """The only descriptors of a worker are its input, its output, its connection and what its own code opened."""
    path = tmp_path / "descriptors"
    with (tmp_path / "secret").open("w", encoding="utf-8"):
        lines = (
            "import os\nnames = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') "
            f"if os.path.exists(f'/proc/self/fd/{{n}}')]\nopen({str(path)!r}, 'w').write('\\n'.join(names))"
        )
        assert workers.run(job_of_lines(lines)).outcome == "ok"
    names = path.read_text(encoding="utf-8").splitlines()
    assert [name for name in names if "secret" in name or "records" in name] == []
    assert len([name for name in names if name.startswith("socket:")]) == 1


def test_marked_processes_are_found() -> None:
    """A process is recognised by its environment, and this process is never in the list."""
    command = [sys.executable, "-I", "-S", "-c", "print(flush=True); input()"]
    environment = {**os.environ, "PYTEST_FA_MARK": "abc"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"  # it runs: until then its environment may still be empty
            assert marked_with("abc") == [process.pid]
        finally:
            process.kill()


# -- the parents ------------------------------------------------------------------------------------------------------

CHANGES = {
    "priority of the server": (
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 7)",
        "the worker server changed: its nice value",
    ),
    "CPUs of the server": ("os.sched_setaffinity(os.getppid(), {0})", "the worker server changed: its CPUs"),
    "limits of the server": (
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (99999, resource.prlimit(0, resource.RLIMIT_CPU)[1]))",
        "the worker server changed: its resource limits",
    ),
    "priority of pytest": ("os.setpriority(os.PRIO_PROCESS, CLIENT, 7)", "pytest's process changed: its nice value"),
    "policy of pytest": (
        "os.sched_setscheduler(CLIENT, os.SCHED_BATCH, os.sched_param(0))",
        "pytest's process changed: its scheduling policy",
    ),
    "oom score of pytest": (
        "open(f'/proc/{CLIENT}/oom_score_adj', 'w').write('900')",
        "pytest's process changed: its oom_score_adj",
    ),
    "a stopped server": ("os.kill(os.getppid(), 19)", "the worker server changed: it was stopped"),
    "priority of the judge": (
        FIND_JUDGE + "os.setpriority(os.PRIO_PROCESS, judge, 19)",
        "the judge changed: its nice value",
    ),
    "CPUs of pytest": ("os.sched_setaffinity(CLIENT, {0})", "pytest's process changed: its CPUs"),
}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: pinning changes nothing")
@pytest.mark.skipif(os.getuid() != 0, reason="only root may raise a priority again")
@pytest.mark.parametrize("name", nightly_but(CHANGES, "priority of the judge", "CPUs of pytest"))
def test_a_change_of_a_parent_is_undone_and_named(job_of_lines: JobOfLines, name: str) -> None:
    """A variant that renices, pins or limits its parents fails, and their state is what it was."""
    lines, words = CHANGES[name]
    with Workers() as workers:
        workers.run(job_of_lines("pass"))
        assert workers._server is not None
        pids = (os.getpid(), workers._server.pid)
        before = [read_scheduling(pid) for pid in pids]
        result = workers.run(job_of_lines(f"import os, resource\nCLIENT = {os.getpid()}\n{lines}"))
        after = [read_scheduling(pid) for pid in pids]
    assert (result.outcome, words in result.message) == ("failed", True), result.message
    assert before == after


@pytest.mark.nightly
def test_a_server_that_does_not_answer_is_replaced(job_of_lines: JobOfLines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped while it should end a worker is killed, and the next job runs on another one."""
    monkeypatch.setattr(fork_server, "END_SECONDS", 1.0)
    with Workers() as workers:
        workers.run(job_of_lines("pass"))
        assert workers._server is not None
        os.kill(workers._server.pid, signal.SIGSTOP)
        start = time.monotonic()
        assert workers.run(job_of_lines("pass")).outcome == "ok"
        assert time.monotonic() - start < 30


def test_a_long_message_is_cut(workers: Workers, job_of_lines: JobOfLines) -> None:
    """An exception with a text of 50 MB becomes a message that can be shown and saved."""
    result = workers.run(job_of_lines("raise ValueError('x' * 50_000_000)"))
    assert (result.outcome, len(result.message) < 11_000) == ("failed", True)


# -- the channel ------------------------------------------------------------------------------------------------------


def test_a_stalled_message_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that begins and does not go on is garbage after the deadline."""
    monkeypatch.setattr(channel_module, "MESSAGE_SECONDS", 0.2)
    near, far = socket.socketpair()
    with near, far:
        far.send(struct.pack("!Q", 10) + b"12345")
        with pytest.raises(Garbage, match="stopped after 5 of 10 bytes"):
            Channel(near).receive()


@pytest.mark.parametrize("size", [0, 1, 2**20 + 1])
def test_messages_arrive_whole(size: int) -> None:
    """A message of any size arrives as it was sent; a large one in parts."""
    near, far = socket.socketpair()
    with near, far:
        if size > 2**16:
            thread = threading.Thread(target=Channel(far).send, args=(b"x" * size,))
            thread.start()
            assert Channel(near).receive() == b"x" * size
            thread.join()
        else:
            Channel(far).send(b"x" * size)
            assert Channel(near).receive() == b"x" * size


def test_the_largest_message_is_bounded() -> None:
    """One byte more than the limit is refused before anything is read."""
    near, far = socket.socketpair()
    with near, far:
        far.send(struct.pack("!Q", MAX_MESSAGE_BYTES + 1))
        with pytest.raises(Garbage, match="was announced; at most"):
            Channel(near).receive()
