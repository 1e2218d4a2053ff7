"""Correct attention in torch that does for honest reasons what exploits do.  Each function is one variant's target.

No check may reject one of them.
"""

from __future__ import annotations

import functools
import gc
import math
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

POOL = ThreadPoolExecutor(2)
SMALL = 2**16  # elements of q
CALLS = {"this process": 0}
OUTPUTS, TABLES, FASTEST = {}, {}, {}


def attend(q, k, v, scale, causal="none"):
    """Return attention computed in float32, [batch, heads, seq_q, head_dim]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).float(), v.repeat_interleave(groups, 1).float()
    s = q.float() @ k.transpose(2, 3) * scale
    if causal != "none":
        s = s.masked_fill(hidden_keys(q.shape[2], k.shape[2], causal, q.device), -math.inf)
    m = s.amax(-1, keepdim=True).clamp_min(-1e30)
    p = torch.exp(s - m)
    return (p.to(q.dtype).float() @ v / p.sum(-1, keepdim=True).clamp_min(1e-30)).to(q.dtype)


def hidden_keys(rows, keys, causal, device):
    """Return the keys that a mask hides from each row, [rows, keys]."""
    offset = keys - rows if causal == "bottom_right" else 0
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1 + offset)


def writes(attention):
    """Make a target that writes the result of `attention(q, k, v, scale, causal)` into `out`."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        return out.copy_(attention(q, k, v, scale, causal))

    return forward


# -- outputs ----------------------------------------------------------------------------------------------------------


def static_output(q, k, v, *, scale, causal="none", out=None):
    """Return the same buffer in every call of a thread and shape."""
    key = (q.shape, q.dtype, q.device, threading.get_ident())
    if key not in OUTPUTS:
        OUTPUTS[key] = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return OUTPUTS[key].copy_(attend(q, k, v, scale, causal))


def view_of_output(q, k, v, *, scale, causal="none", out=None):
    out[:] = attend(q, k, v, scale, causal)
    return out[:]


class Labelled(torch.Tensor):
    """A tensor with a label, as libraries use them inside."""


def parameter(q, k, v, *, scale, causal="none", out=None):
    return torch.nn.Parameter(attend(q, k, v, scale, causal), requires_grad=False)


def subclass_inside(q, k, v, *, scale, causal="none", out=None):
    result = attend(q.as_subclass(Labelled), k, v, scale, causal)
    return result.as_subclass(torch.Tensor)


@writes
def copies_of_inputs(q, k, v, scale, causal):
    return attend(q.clone(), k.clone(), v.clone().mul_(1), scale, causal)


# -- state of the process ---------------------------------------------------------------------------------------------


@writes
def workspace(q, k, v, scale, causal):
    """Keep a buffer for the scores of each shape."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for tensor in (k, v))
    key = (*q.shape, k.shape[2], q.device, threading.get_ident())
    if key not in OUTPUTS:
        OUTPUTS[key] = torch.empty(*q.shape[:3], k.shape[2], device=q.device)
    s = torch.matmul(q.float(), k.transpose(2, 3), out=OUTPUTS[key]).mul_(scale)
    if causal != "none":
        s.masked_fill_(hidden_keys(q.shape[2], k.shape[2], causal, q.device), -math.inf)
    p = s.sub_(s.amax(-1, keepdim=True).clamp_min(-1e30)).exp_()
    return p @ v / p.sum(-1, keepdim=True).clamp_min(1e-30)


@writes
def table_of_masks(q, k, v, scale, causal):
    """Keep the mask of each shape."""
    key = (q.shape[2], k.shape[2], causal, q.device)
    if key not in TABLES:
        none = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        TABLES[key] = none if causal == "none" else hidden_keys(q.shape[2], k.shape[2], causal, q.device)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for tensor in (k, v))
    s = (q.float() @ k.transpose(2, 3) * scale).masked_fill(TABLES[key], -math.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp_min(-1e30))
    return p @ v / p.sum(-1, keepdim=True).clamp_min(1e-30)


@functools.cache
def compiled_for(shape, causal):  # the key of the cache
    return lambda q, k, v, scale: attend(q, k, v, scale, causal)


@writes
def cache_of_shapes(q, k, v, scale, causal):
    return compiled_for((q.shape, k.shape, q.dtype), causal)(q, k, v, scale)


@writes
def autotuned(q, k, v, scale, causal):
    """Time two ways in the first call of a shape, and keep the faster one."""
    key = (q.shape, k.shape, q.dtype, causal)
    if key not in FASTEST:
        FASTEST[key] = min((attend, in_chunks), key=lambda way: seconds_of(way, q, k, v, scale, causal))
    return FASTEST[key](q, k, v, scale, causal)


def in_chunks(q, k, v, scale, causal):
    return torch.cat([attend(*heads, scale, causal) for heads in zip(*(t.split(1) for t in (q, k, v)), strict=True)])


def seconds_of(way, *arguments):
    start = time.perf_counter()
    way(*arguments)
    return time.perf_counter() - start


@writes
def warmed_up(q, k, v, scale, causal):
    """Make three calls on data of its own before the first one."""
    CALLS["this process"] += 1
    if CALLS["this process"] == 1:
        for _ in range(3):
            attend(torch.randn_like(q), torch.randn_like(k), torch.randn_like(v), scale, causal)
    return attend(q, k, v, scale, causal)


# -- threads, processes, tools ----------------------------------------------------------------------------------------


@writes
def joined_thread(q, k, v, scale, causal):
    results = []
    thread = threading.Thread(target=lambda: results.append(attend(q, k, v, scale, causal)))
    thread.start()
    thread.join()
    return results[0]


@writes
def pool_of_threads(q, k, v, scale, causal):
    parts = [POOL.submit(attend, *batch, scale, causal) for batch in zip(*(t.split(1) for t in (q, k, v)), strict=True)]
    return torch.cat([part.result() for part in parts])


def serve_attention(connection):
    """Answer requests in a helper process."""
    torch.set_num_threads(1)
    while True:
        arguments = connection.recv()
        connection.send(attend(*arguments))


@functools.cache
def helper():
    """Fork a helper process once, and return the connection to it."""
    connection, other_end = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=serve_attention, args=(other_end,), daemon=True).start()
    return connection


@writes
def helper_process(q, k, v, scale, causal):
    """Let a helper process compute small problems, over a pipe that copies the tensors."""
    if q.numel() > SMALL or q.device.type != "cpu" or threading.current_thread() is not threading.main_thread():
        return attend(q, k, v, scale, causal)
    connection = helper()
    connection.send([tensor.clone() for tensor in (q, k, v)] + [scale, causal])
    return connection.recv()


class Problem:
    """A problem that can be pickled, as caches on disk need it."""

    def __init__(self, scale, causal):
        self.scale, self.causal = scale, causal


@writes
def pickled_class(q, k, v, scale, causal):
    """Pickle a function and an object of a class of this module."""
    attention, problem = pickle.loads(pickle.dumps((attend, Problem(scale, causal))))
    return attention(q, k, v, problem.scale, problem.causal)


@writes
def starts_a_program(q, k, v, scale, causal):
    """Start a program once, as compilers at run time do."""
    version_of_python()
    return attend(q, k, v, scale, causal)


@functools.cache
def version_of_python():
    return subprocess.run([sys.executable, "-S", "-c", "print(1)"], check=True, capture_output=True, text=True).stdout


@writes
def looks_around(q, k, v, scale, causal):
    """Read the names of modules, the objects in memory and the clock, as profilers and loggers do."""
    CALLS["this process"] += 1
    if CALLS["this process"] % 100 == 1:
        gc.collect()
        CALLS["modules"] = sum(name.startswith("pytest_fa") for name in sys.modules)
    start = time.perf_counter_ns()
    result = attend(q, k, v, scale, causal)
    CALLS["nanoseconds"] = time.perf_counter_ns() - start
    return result
