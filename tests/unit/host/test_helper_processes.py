"""An honest variant may use helper processes and pickle; torch's attention in a helper is noticed all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pytest_fa.host.client import Workers
from pytest_fa.processes import forks_of
from tests.factories import PYTHON_SOURCE
from tests.worker_jobs import JobOfSource

ATTEND = PYTHON_SOURCE.replace("def forward(", "def attend(")
FORWARD = "def forward(q, k, v, *, scale, causal='none', out=None):\n"
HONEST = {
    "a forked helper computes": """\
import multiprocessing
near, far = multiprocessing.Pipe()
def serve():
    torch.set_num_threads(1)
    while True:
        *tensors, scale = far.recv()
        far.send(attend(*map(torch.from_numpy, tensors), scale=scale).numpy())
multiprocessing.get_context("fork").Process(target=serve, daemon=True).start()
"""
    + FORWARD
    + """\
    near.send((q.numpy().copy(), k.numpy().copy(), v.numpy().copy(), scale))
    return out.copy_(torch.from_numpy(near.recv()))
""",
    "a pool computes": """\
import multiprocessing
def one_head(task):
    q, k, v, scale = task
    torch.set_num_threads(1)
    return attend(*map(torch.from_numpy, (q, k, v)), scale=scale).numpy()
pool = multiprocessing.get_context("fork").Pool(2)
"""
    + FORWARD
    + """\
    tasks = [(q.numpy().copy(), k.numpy().copy(), v.numpy().copy(), scale)] * 2
    return out.copy_(torch.from_numpy(pool.map(one_head, tasks)[1]))
""",
    "it pickles its own function and class": "import pickle\nclass Problem:\n    pass\n"
    + FORWARD
    + """\
    function, problem = pickle.loads(pickle.dumps((attend, Problem())))
    assert type(problem) is Problem
    return function(q, k, v, scale=scale, out=out)
""",
    "it imports itself": "import importlib, sys\n"
    + FORWARD
    + "    return importlib.import_module(__name__).attend(q, k, v, scale=scale, out=out)\n",
}
DELEGATING = {
    "a forked helper": HONEST["a forked helper computes"],
    "a pool": HONEST["a pool computes"],
    "a new program": """\
import pickle, subprocess, sys
program = subprocess.Popen([sys.executable, "-c", '''
import pickle, sys, torch
while True:
    q, k, v, scale = pickle.load(sys.stdin.buffer)
    out = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), scale=scale)
    pickle.dump(out.numpy(), sys.stdout.buffer)
    sys.stdout.flush()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
"""
    + FORWARD
    + """\
    pickle.dump((q.numpy().copy(), k.numpy().copy(), v.numpy().copy(), scale), program.stdin)
    program.stdin.flush()
    return out.copy_(torch.from_numpy(pickle.load(program.stdout)))
""",
}
ASK_LIBRARY = """\
import torch
def attend(q, k, v, *, scale):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
"""


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_variant_is_not_blamed(workers: Workers, job_of_source: JobOfSource, name: str) -> None:
    """A variant that computes itself, in a forked helper or after pickling, is right in every check."""
    result = workers.run(job_of_source(ATTEND + HONEST[name], without_attention=True))
    assert (result.outcome, result.caught_by) == ("ok", ()), result.message


@pytest.mark.nightly
@pytest.mark.parametrize("name", DELEGATING)
def test_delegation_in_a_helper_is_noticed(workers: Workers, job_of_source: JobOfSource, name: str) -> None:
    """A helper that calls torch's attention gives another result, or is stopped because it is a new program."""
    job = job_of_source(ASK_LIBRARY + DELEGATING[name], without_attention=True, watchdog_seconds=20.0)
    result = workers.run(job)
    assert (result.outcome, result.caught_by) == ("wrong", ("delegation",)), result.message
    assert "in a process in which torch's attention computes something else" in result.message


@pytest.fixture
def forked() -> Iterator[int]:
    """A forked child of this process, which sleeps."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_forks_are_told_from_programs(forked: int) -> None:
    """A forked child is a fork; a child that has become another program, even the same one, is none."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        forks = forks_of(os.getpid())
        assert program.stdin is not None
        program.stdin.close()
    assert forked in forks
    assert program.pid not in forks
