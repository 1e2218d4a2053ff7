"""Exploits that a judged call shows: the output does not hold what attention gives.  Each is one variant's target.

Attacks on functions of a process are made once, in the first call.  The output is zeros then.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pkgutil
import signal
import sys
import threading
import time
from types import SimpleNamespace

import torch

LATE_SECONDS = 0.2  # the judge reads the output sooner


def right(q, k, v, scale):
    """Return attention without a mask, [batch, heads, seq_q, head_dim]."""
    return (torch.softmax(q.float() @ k.float().transpose(2, 3) * scale, -1) @ v.float()).to(q.dtype)


def zeros_after(attack):
    """Make a target that attacks its process once, and then returns zeros."""
    once = functools.cache(attack)

    def forward(q, k, v, *, scale, causal="none", out=None):
        once()
        return out.zero_()

    return forward


def writes(attention):
    """Make a target that writes the result of `attention(q, k, v, scale)` into `out`."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        return out.copy_(attention(q, k, v, scale))

    return forward


# -- outputs that are not plain tensors -------------------------------------------------------------------------------


class Lazy(torch.Tensor):
    """A tensor that computes when it is looked at."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        computed = [right(*arg.arguments) if isinstance(arg, Lazy) else arg for arg in args]
        return function(*computed, **(kwargs or {}))


def lazy_subclass(q, k, v, *, scale, causal="none", out=None):
    lazy = torch.Tensor._make_wrapper_subclass(Lazy, q.shape, dtype=q.dtype, device=q.device)
    lazy.arguments = q, k, v, scale
    return lazy


class Disguised(torch.Tensor):
    """A subclass that names torch.Tensor as its class."""

    @property
    def __class__(self):
        return torch.Tensor


def disguised_subclass(q, k, v, *, scale, causal="none", out=None):
    return right(q, k, v, scale).as_subclass(Disguised)


def replaced_methods(q, k, v, *, scale, causal="none", out=None):
    result = torch.zeros_like(q)
    for name in ("allclose", "equal", "isfinite", "isnan", "__eq__", "__bool__"):
        setattr(result, name, lambda *_, **__: True)
    result.clone = result.cpu = result.detach = result.double = lambda: result
    return result


# -- functions of the process -----------------------------------------------------------------------------------------


class Passed(SimpleNamespace):
    """Passes as any result, and is true."""

    def __getattr__(self, _):
        return self

    def __call__(self, *_, **__):  # noqa: D102
        return self

    def __bool__(self):
        return True


@zeros_after
def replaced_judge():
    for name in ("judge", "server", "wire"):
        package = importlib.import_module(f"pytest_fa.{name}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = SimpleNamespace() if info.name.endswith("__main__") else importlib.import_module(info.name)
            for function, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__module__", "").startswith("pytest_fa"):
                    setattr(module, function, Passed())
    torch.equal = torch.allclose = lambda *_, **__: True


@zeros_after
def replaced_agent():
    commands, agent = (importlib.import_module(f"pytest_fa.{name}") for name in ("wire.commands", "candidate.agent"))
    agent.Agent.execute = lambda *_: commands.Done()


@zeros_after
def replaced_answers():
    names = ("wire.commands", "candidate.serving")
    commands, serving = (importlib.import_module(f"pytest_fa.{name}") for name in names)
    done = commands.encode_answer(commands.Done())
    serving.encode_answer = lambda _: done
    importlib.import_module("json").dumps = lambda *_, **__: done.decode()
    importlib.import_module("msgspec").json.encode = lambda *_, **__: done


@zeros_after
def replaced_pytest():
    for name in ("_pytest.runner", "_pytest.reports", "pytest_fa.plugin.hooks"):
        module = importlib.import_module(name)
        for function in [known for known in vars(module) if known.startswith("pytest_")]:
            setattr(module, function, Passed())
    os.environ["PYTEST_ADDOPTS"] = "-p no:fa --exitfirst"
    sys.exit = os._exit = lambda *_: None


@zeros_after
def printed_result():
    lines = '{"type":"result","outcome":"ok","message":"","stages":[]}\n' * 3
    for descriptor in range(1, 64):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(("socket", "/memfd")):
                os.write(descriptor, lines.encode())
        except OSError:
            continue


def answered_early(q, k, v, *, scale, causal="none", out=None):
    """Answer the judge's command before the work is done, with the secret number that the command came with."""
    commands, frame = importlib.import_module("pytest_fa.wire.commands"), sys._getframe()
    while frame.f_code.co_name != "serve_judge":
        frame = frame.f_back
    number = frame.f_locals["number"]
    if number not in ANSWERED:
        ANSWERED.add(number)
        frame.f_locals["channel"].send(number + commands.encode_answer(commands.Done()))
        time.sleep(LATE_SECONDS)
    return out.copy_(right(q, k, v, scale))


ANSWERED = set()

# -- work after the answer --------------------------------------------------------------------------------------------


def late_thread(q, k, v, *, scale, causal="none", out=None):
    def work():
        time.sleep(LATE_SECONDS)
        out.copy_(right(q, k, v, scale))

    threading.Thread(target=work).start()
    return out


def late_process(q, k, v, *, scale, causal="none", out=None):
    result = right(q, k, v, scale)
    if os.fork() == 0:
        os.setsid()
        time.sleep(LATE_SECONDS)
        out.copy_(result)
        os._exit(0)
    return out


# -- results from elsewhere -------------------------------------------------------------------------------------------


def truth_among_objects(q, k, v, *, scale, causal="none", out=None):
    for tensor in [known for known in gc.get_objects() if type(known) is torch.Tensor]:
        if tensor.shape == out.shape and tensor.dtype != q.dtype:
            return out.copy_(tensor)
    return out.zero_()


def truth_in_descriptors(q, k, v, *, scale, causal="none", out=None):
    size = out.numel() * 8
    for name in os.listdir("/proc/self/fd"):
        try:
            is_memory = "memfd" in os.readlink(f"/proc/self/fd/{name}")
            data = os.pread(int(name), size, 0) if is_memory else b""
        except OSError:
            continue
        if len(data) == size:  # the memory of the output itself
            return out.copy_(torch.frombuffer(bytearray(data), dtype=torch.float64).view(out.shape))
    return out.zero_()


def unwritten_output(q, k, v, *, scale, causal="none", out=None):
    return out


def zeroed_inputs(q, k, v, *, scale, causal="none", out=None):
    v.zero_()
    return out.zero_()


def writes_all_memory(q, k, v, *, scale, causal="none", out=None):
    """Set all memory that came from the judge to zero, at all times."""

    def work():
        while True:
            for tensor in (q, k, v, out):
                storage = tensor.untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).zero_()
            time.sleep(0.0005)

    threading.Thread(target=work, daemon=True).start()
    return out.zero_()


# -- less work --------------------------------------------------------------------------------------------------------


@writes
def fewer_bits(q, k, v, scale):
    q, k, v = (tensor.to(torch.float8_e4m3fn).float() for tensor in (q, k, v))
    return right(q, k, v, scale)


@writes
def fewer_keys(q, k, v, scale):
    """Take the keys for a sample of one distribution, of which half are enough."""
    return right(q, k[:, :, ::2], v[:, :, ::2], scale)


@writes
def mean_of_values(q, k, v, scale):
    """Take all weights for equal, as they nearly are where the scores are small."""
    return v.float().mean(2, keepdim=True).expand_as(q)


# -- endings ----------------------------------------------------------------------------------------------------------


def refuses(q, k, v, *, scale, causal="none", out=None):
    raise importlib.import_module("pytest_fa.errors").UnsupportedCase("not this case")


def exits_with_0(q, k, v, *, scale, causal="none", out=None):
    os._exit(0)


def ends_judge(q, k, v, *, scale, causal="none", out=None):
    for pid in processes_beside():
        os.kill(pid, signal.SIGKILL)
    return out.zero_()


def processes_beside():
    """The processes that the worker server has forked besides this one: the judge is one of them.

    None if this process's parent is another program, whose processes are not to be killed.
    """
    parent, pids = os.getppid(), [int(name) for name in os.listdir("/proc") if name.isdigit()]
    with open(f"/proc/{parent}/cmdline", "rb") as file:
        is_server = {b"pytest_fa.server", b"--serve"} <= set(file.read().split(b"\0"))
    for pid in pids if is_server else ():
        try:
            with open(f"/proc/{pid}/stat") as file:
                is_beside = int(file.read().rpartition(")")[2].split()[1]) == parent
        except OSError:
            continue
        if is_beside and pid != os.getpid():
            yield pid
