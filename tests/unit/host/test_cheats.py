"""What the self-test cannot plant as an exploit: knowledge of a series, gates, and the judge's own process.

`pytest --fa-selftest` has the other exploits, and honest twins of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

import pytest
import torch

from pytest_fa.candidate.forward import Forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import WrongResult
from pytest_fa.features.selftest.plugin import FOLDER as SELFTEST_KERNELS
from pytest_fa.gpu.inputs import Inputs, Output
from pytest_fa.host.client import Workers
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.properties.calls import new_data, new_shape
from pytest_fa.judge.subject import PropertySubject
from pytest_fa.wire.jobs import Arm, ArmPair, CaseResult, PairedJob, encode
from tests.factories import PYTHON_SOURCE, variant
from tests.worker_jobs import FIND_JUDGE, TINY, JobOfSource

# Attention for the sources below, and the beginning of the function that the judge calls.
RIGHT = """\
import gc, os, sys, threading, time
import torch
import torch.nn.functional as F

def right(q, k, v, scale):
    return (torch.softmax(q.float() @ k.float().transpose(2, 3) * scale, -1) @ v.float()).to(q.dtype)

def frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back

def is_timed():
    return any(frame.f_code.co_name == "run" and "series" in frame.f_code.co_filename for frame in frames())

"""
FORWARD = "def forward(q, k, v, *, scale, causal='none', out=None):\n"
ZEROS = FORWARD + "    return out.zero_()\n"
HONEST = FORWARD + "    return out.copy_(right(q, k, v, scale))\n"


def outcome_of(result: CaseResult) -> tuple[str, tuple[str, ...]]:
    """The outcome of a result, and the first check that it names."""
    return result.outcome, result.caught_by[:1]


# -- timed calls ------------------------------------------------------------------------------------------------------

WHILE_TIMED = """\
count = 0
def forward(q, k, v, *, scale, causal="none", out=None):
    global count
    if is_timed():
        count += 1
        if count % 8:
            return out
    return out.copy_(right(q, k, v, scale))
"""
SAME_DATA_AGAIN = """\
seen = set()
def forward(q, k, v, *, scale, causal="none", out=None):
    key = tuple(tensor.flatten()[:512].view(torch.int16).numpy().tobytes() for tensor in (q, k, v))
    if is_timed() and key in seen:
        print("a kept result can be used")
    seen.add(key)
    return out.copy_(right(q, k, v, scale))
"""
WRITTEN_AGAIN = (
    FORWARD
    + """\
    for frame in frames():
        if frame.f_code.co_name == "run" and "series" in frame.f_code.co_filename:
            series, count = frame.f_locals["self"], frame.f_locals["count"]
            slot = series._calls[series._next - 1][-1]
            if any(call[-1] == slot for call in series._calls[series._next : count]):
                print("this call can be skipped")
    return out.copy_(right(q, k, v, scale))
"""
)


@pytest.mark.parametrize("source", [SAME_DATA_AGAIN, WRITTEN_AGAIN], ids=["same data again", "written again"])
def test_no_timed_call_can_be_skipped(workers: Workers, job_of_source: JobOfSource, source: str) -> None:
    """A variant that knows the whole series sees no data twice, and no output that a later call writes again."""
    workers.take_output()
    result = workers.run(job_of_source(RIGHT + source, time=True))
    assert (outcome_of(result), workers.take_output()) == (("ok", ()), ""), result.message


def gate_of(job_of_source: JobOfSource, source: str) -> PairedJob:
    """One process of a gate: this variant against straightforward attention."""
    candidate, baseline = (Arm(job_of_source(text).variant, None) for text in (source, PYTHON_SOURCE))
    return PairedJob((ArmPair(parse_case(TINY), candidate, baseline),), "cpu", "same_precision", 0)


def test_a_gate_judges_timed_calls(workers: Workers, job_of_source: JobOfSource) -> None:
    """A gate refuses a candidate that skips timed calls."""
    source = RIGHT + WHILE_TIMED
    result = workers.run_paired(gate_of(job_of_source, source))
    assert result.outcome == "wrong"
    assert "in an output of the timed calls" in result.message


STOPS_LATE = """\
runs = 0
def forward(q, k, v, *, scale, causal="none", out=None):
    global runs
    runs += any(frame.f_code.co_name == "run" and frame.f_locals["self"]._next == 1
        for frame in frames() if "series" in frame.f_code.co_filename)
    return out if runs > 24 else out.copy_(right(q, k, v, scale))
"""


def test_a_gate_judges_late_calls(workers: Workers, job_of_source: JobOfSource) -> None:
    """A candidate that computes in the first 16 samples of a gate's process and then stops is refused."""
    result = workers.run_paired(gate_of(job_of_source, RIGHT + STOPS_LATE))
    assert result.outcome == "wrong"
    assert "in an output of the timed calls" in result.message


def test_a_gate_times_outside(workers: Workers, job_of_source: JobOfSource) -> None:
    """A candidate that takes 2 ms and stops the clocks of its process has at least 2 ms in a gate on the CPU."""
    source = (SELFTEST_KERNELS / "python_cheats" / "timed_calls.py").read_text(encoding="utf-8")
    result = workers.run_paired(gate_of(job_of_source, source + "\nforward = detoured_clock\n"))
    assert result.outcome == "ok", result.message
    assert result.arm_pairs[0].candidate_us >= 2000


def test_a_gate_names_a_replaced_clock(workers: Workers, job_of_source: JobOfSource) -> None:
    """A candidate of a gate that replaces a clock is a cheat, whatever its time is."""
    result = workers.run_paired(gate_of(job_of_source, RIGHT + "time.time_ns = lambda: 0\n" + HONEST))
    assert (result.outcome, result.arm_pairs) == ("cheat", ())
    assert "it replaced functions of its process: time.time_ns" in result.message


# -- memory that both sides see ---------------------------------------------------------------------------------------


class _LateWriter(PropertySubject):
    """After each call, a thread of the candidate sets the inputs that it sees to zero."""

    def call(self, inputs: Inputs, output: Output | None = None) -> Output:
        buffer = super().call(inputs, output)
        for tensor in inputs[:3]:
            tensor.zero_()
        return buffer


def _zeros(*_: object, out: torch.Tensor | None = None, **__: object) -> torch.Tensor:
    assert out is not None
    return out.zero_()


@pytest.mark.parametrize("judge_property", [new_data, new_shape])
def test_truth_comes_from_the_judges_inputs(judge_property: object) -> None:
    """Zeros are wrong, also if the candidate makes the inputs zero between the call and the verdict."""
    candidate = Candidate.of_function(cast("Forward", _zeros), "cpu")
    subject = _LateWriter(variant("mine"), parse_case("b2h2s32d64-fp16-seed0"), "same_precision", candidate)
    assert callable(judge_property)
    with pytest.raises(WrongResult, match="max error"):
        judge_property(subject)


def test_a_forged_workspace_is_refused(workers: Workers, job_of_source: JobOfSource) -> None:
    """A candidate on the CPU that asks the judge for 64 GiB gets nothing."""
    source = "from pytest_fa.candidate import agent\nagent.Agent._workspace_bytes = lambda *_: 2**36\n" + RIGHT + HONEST
    result = workers.run(job_of_source(source))
    assert outcome_of(result) == ("cheat", ("functions",))
    assert "; it asks for a workspace of 68719476736 bytes; on cpu, at most 0 are allowed" in result.message


# -- delegation -------------------------------------------------------------------------------------------------------

ASK_LIBRARY = "F.scaled_dot_product_attention(q, k, v, scale=scale)"
STARTS_HELPER = """\
import multiprocessing
near, far = multiprocessing.Pipe()
def serve():
    while True:
        far.send(far.recv() + 1)
multiprocessing.get_context("fork").Process(target=serve, daemon=True).start()
near.send(1)
near.recv()
"""
OWN_WORK_TWINS = {
    "in place": HONEST,
    "returns a new tensor": FORWARD + "    return right(q, k, v, scale)\n",
    "asks whether it is observed": FORWARD
    + "    names = [frame.f_code.co_name for frame in frames()]\n"
    + "    return out.copy_(right(q, k, v, scale))\n",
    "has started a process that it does not need": STARTS_HELPER + HONEST,
    "needs a process only in its first call": STARTS_HELPER
    + "seen = []\n"
    + FORWARD
    + "    seen.append((near.send(1), near.recv())) if not seen else None\n"
    + "    return out.copy_(right(q, k, v, scale))\n",
}
UNSEEN = {
    "the observer is replaced": "from pytest_fa.candidate import agent\n"
    "agent.operators_of = lambda call: (call(), ())[1]\n" + FORWARD + f"    return out.copy_({ASK_LIBRARY})\n",
    "only while unobserved": FORWARD
    + "    if any(frame.f_code.co_name == 'operators_of' for frame in frames()):\n"
    + "        return out.copy_(right(q, k, v, scale))\n"
    + f"    return out.copy_({ASK_LIBRARY})\n",
    "in another process": """\
import multiprocessing
near, far = multiprocessing.Pipe()
def serve():
    while True:
        q, k, v, scale = far.recv()
        q, k, v = map(torch.from_numpy, (q, k, v))
        far.send(F.scaled_dot_product_attention(q, k, v, scale=scale).numpy())
multiprocessing.get_context("fork").Process(target=serve, daemon=True).start()
"""
    + FORWARD
    + """\
    near.send((q.numpy().copy(), k.numpy().copy(), v.numpy().copy(), scale))
    return out.copy_(torch.from_numpy(near.recv()))
""",
}


@pytest.mark.parametrize("name", OWN_WORK_TWINS)
def test_own_work_is_right_without_torchs_attention(workers: Workers, job_of_source: JobOfSource, name: str) -> None:
    """A variant that computes itself is `ok` where torch's attention is another and its helpers are stopped."""
    for _ in range(2):
        result = workers.run(job_of_source(RIGHT + OWN_WORK_TWINS[name], without_attention=True))
        assert outcome_of(result) == ("ok", ()), result.message


@pytest.mark.parametrize("name", UNSEEN)
def test_hidden_delegation_is_seen(workers: Workers, job_of_source: JobOfSource, name: str) -> None:
    """A variant that hides its call of torch's own attention is named, too: without it, its output is wrong."""
    watchdog_seconds = 2.0 if "process" in name else 60.0  # where its helper process is stopped, the variant hangs
    job = job_of_source(RIGHT + UNSEEN[name], without_attention=True, watchdog_seconds=watchdog_seconds)
    result = workers.run(job)
    expected = ("cheat", ("functions",)) if "replaced" in name else ("wrong", ("delegation",))
    assert outcome_of(result) == expected, result.message
    assert "in a process in which torch's attention computes something else" in result.message


def test_a_variant_that_changes_its_own_file_is_named(workers: Workers, job_of_source: JobOfSource) -> None:
    """A variant that writes other code into its file while it runs gets no verdict: the next process would load it."""
    source = RIGHT + "from pathlib import Path\nPath(__file__).write_text('forward = None')\n" + HONEST
    result = workers.run(job_of_source(source))
    assert outcome_of(result) == ("build_changed", ("hash of the build",)), result.message
    assert "entry.py changed while the variant ran; run it again" in result.message


# -- the judge's process ----------------------------------------------------------------------------------------------

# While the judge works, the variant reads what is mapped there.  Only root may; the test is root then, too.
READ_MAPS = (
    FIND_JUDGE
    + """\
def forward(q, k, v, *, scale, causal="none", out=None):
    with open(f"/proc/{judge}/maps") as maps, open(PATH, "a") as copy:
        copy.write(maps.read())
    return out.copy_(right(q, k, v, scale))
"""
)


@pytest.mark.nightly
@pytest.mark.skipif(os.getuid() != 0, reason="only root may read what another process has mapped")
def test_the_judge_maps_nothing_of_a_variant(job_of_source: JobOfSource, tmp_path: Path) -> None:
    """No file of a kernel folder or of the build cache is mapped in the judge, and its memory files have no name."""
    path = tmp_path / "maps"
    with Workers(tmp_path / "cache") as workers:
        source = RIGHT + READ_MAPS.replace("PATH", repr(str(path)))
        assert outcome_of(workers.run(job_of_source(source, time=True))) == ("ok", ())
        assert workers.run(job_of_source(RIGHT + "values = {}\n" + ZEROS)).outcome == "wrong"  # with its diagnosis
    lines = path.read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    assert any("libtorch" in name for name in files)
    assert [name for name in files if str(tmp_path) in name or "pytest-fa/builds" in name] == []


WRITE_IMPORTS = """\
import os, sys
def write(event, arguments):
    if event == "import":
        with open(f"{LOG}-{os.getpid()}", "a") as file:
            file.write(f"{arguments[0]} {arguments[1]}\\n")
sys.addaudithook(write)
"""


@pytest.mark.nightly
def test_the_judge_imports_nothing_of_a_variant(
    job_of_source: JobOfSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once forked, the judge imports no module at all; the server imports none from the current folder."""
    log = tmp_path / "imports"
    hook = WRITE_IMPORTS.replace("LOG", repr(str(log)))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(hook, encoding="utf-8")
    (tmp_path / "secrets.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    (tmp_path / "beside.py").write_text("factor = 1\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    with Workers() as workers:
        source = RIGHT + "import beside, colorsys\n" + HONEST
        assert outcome_of(workers.run(job_of_source(source, time=True))) == ("ok", ())
        assert workers.run(job_of_source(RIGHT + ZEROS, repeats=3)).outcome == "wrong"
        assert workers._judge is not None
        assert workers._server is not None
        judge, server = (Path(f"{log}-{pid}") for pid in (workers._judge.pid, workers._server.pid))
        assert "pytest_fa.judge.output_check " in server.read_text(encoding="utf-8")
        assert not judge.exists(), judge.read_text(encoding="utf-8")


ATTACH = """\
import ctypes
def opened(pid):
    names = []
    for name in ("mem", "maps", "environ"):
        try:
            open(f"/proc/{pid}/{name}", "rb").read(0 if name == "mem" else 1)
            names.append(name)
        except OSError:
            pass
    if ctypes.CDLL(None).ptrace(0x4206, pid, 0, 0) == 0:  # PTRACE_SEIZE
        names.append("ptrace")
    if ctypes.CDLL(None).syscall(438, os.pidfd_open(pid), 0, 0) >= 0:
        names.append("pidfd_getfd")
    return names
def forward(q, k, v, *, scale, causal="none", out=None):
    raise ValueError(f"opened: {opened(judge)} {opened(server)}, as user {os.getuid()}")
"""
# Serves as another user: started as root, it changes the user and thus may not read the judge's memory any more.
SERVE_AS_USER = """\
import ctypes, os, socket, sys
from pathlib import Path
from pytest_fa.wire.channel import channel_pair
from pytest_fa.wire.jobs import CaseResult, Connect, decode_answer, encode, read_job
from pytest_fa.server.process import serve

control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    control.close()
    if os.getuid() == 0:
        os.fchmod(1, 0o666)
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # the kernel forbids attaching after a change of the user
    serve(far)
    os._exit(0)
far.close()

def fork(role):
    near, end = channel_pair()
    socket.send_fds(control, [role], [end.fileno()])
    return int(control.recv(64)), near

_, judge = fork(b"judge")
pid, candidate = fork(b"candidate")
judge.send(encode(Connect(pid)), candidate.fileno())
judge.send(Path(sys.argv[1]).read_bytes())
while not isinstance(answer := decode_answer(judge.receive()), CaseResult):
    pass
sys.stderr.write(answer.message.splitlines()[0])
"""


def test_a_variant_cannot_attach_to_the_judge(job_of_source: JobOfSource, tmp_path: Path) -> None:
    """A process of the same user, which is not root, can neither read the judge and the server nor take descriptors."""
    job = job_of_source(RIGHT + FIND_JUDGE + ATTACH)
    for folder in (tmp_path, *tmp_path.parents):
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    path = tmp_path / "job.json"
    path.write_bytes(encode(job))
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", SERVE_AS_USER, str(path)]
        process = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    user = os.getuid() or 65534
    assert f"ValueError: opened: [] [], as user {user}" in process.stderr


# A candidate of a gate that lowers the priority of its siblings: of the judge's other candidates, not of the judge.
RENICES_ARMS = """
import os, pathlib
def renice():
    children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    for pid in sorted(map(int, children))[-3:]:
        if pid != os.getpid():
            os.setpriority(os.PRIO_PROCESS, pid, 5)
renice()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may raise a priority again")
def test_a_gate_watches_the_processes_of_its_other_arms(workers: Workers, job_of_source: JobOfSource) -> None:
    """There is no verdict if the priority of the baseline's process was lowered; the message says what changed."""
    job = gate_of(job_of_source, RIGHT + HONEST.replace("    return", "    renice()\n    return", 1) + RENICES_ARMS)
    result = workers.run_paired(job)
    assert result.outcome == "inconclusive"
    assert "the process of another arm changed: its nice value" in result.message
    assert "The candidate did it, or that arm itself" in result.message
