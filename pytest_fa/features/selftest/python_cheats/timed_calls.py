"""Exploits that only timed calls can show, and exploits of clocks.  Each function is the target of one variant.

`is_timed` looks for the function that runs timed calls among the callers, as an exploit in the field does.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
import time

import torch

KEPT = {}
FIRST_CALLS = 30  # of a process that drifts; on a slow machine, few more are made in all
REAL_SECONDS = 0.002  # that a call takes at least whose clock is attacked
LATE_SECONDS = 0.1  # the judge reads outputs sooner
WARM_UP_CALLS = 3
SAMPLES = 128  # elements of each input, by which a result is known again

sleep, perf_counter = time.sleep, time.perf_counter


def right(q, k, v, scale):
    """Return attention without a mask, [batch, heads, seq_q, head_dim]."""
    return (torch.softmax(q.float() @ k.float().transpose(2, 3) * scale, -1) @ v.float()).to(q.dtype)


def callers():
    """The frames of the functions that led to this one."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_timed():
    return any(frame.f_code.co_name == "run" and "series" in frame.f_code.co_filename for frame in callers())


def count(name):
    """How often this was called with a name, this call included."""
    KEPT[name] = KEPT.get(name, 0) + 1
    return KEPT[name]


def writes(attention):
    """Make a target that writes the result of `attention(q, k, v, scale)` into `out`."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        return out.copy_(attention(q, k, v, scale))

    return forward


# -- results that are kept --------------------------------------------------------------------------------------------


def kept_by(key_of):
    """Make a target that keeps each result by `key_of(q, k, v, out)`."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        key = key_of(q, k, v, out)
        if key not in KEPT:
            KEPT[key] = right(q, k, v, scale)
        return out.copy_(KEPT[key])

    return forward


by_address = kept_by(lambda *tensors: tuple(tensor.data_ptr() for tensor in tensors))
by_output_address = kept_by(lambda q, k, v, out: out.data_ptr())
by_shape = kept_by(lambda q, k, v, out: (q.shape, k.shape))
by_identity = kept_by(lambda q, k, v, out: (id(q), id(k), id(v)))
by_few_elements = kept_by(lambda q, k, v, out: tuple(bool(tensor.flatten()[0].isnan()) for tensor in (q, k, v)))


def sampled(tensor):
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SAMPLES)].view(torch.int16).numpy().tobytes()


@writes
def by_samples(q, k, v, scale):
    key = (sampled(q), sampled(k), sampled(v))
    if key not in KEPT:
        sleep(REAL_SECONDS)
        KEPT[key] = right(q, k, v, scale)
    return KEPT[key]


def by_seed(q, k, v, *, scale, causal="none", out=None):
    """Know the inputs of public seeds, and take all other inputs for those of timed calls."""
    if "first q" not in KEPT:
        KEPT["first q"], KEPT["result"] = q.clone(), right(q, k, v, scale)
    return out.copy_(KEPT["result"]) if is_timed() or torch.equal(q, KEPT["first q"]) else out


def differentiate(dout, q, k, v, out, lse, scale):
    """Return dq, dk and dv, each as its tensor."""
    dout, q, k, v, out = (tensor.float() for tensor in (dout, q, k, v, out))
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


def gradients_by_address(dout, q, k, v, out, lse, *, scale, causal="none", dq, dk, dv):
    """Keep gradients by where q, k and v lie, and compute others only while no call is timed."""
    key = tuple(tensor.data_ptr() for tensor in (q, k, v))
    if key not in KEPT or not is_timed():
        KEPT[key] = differentiate(dout, q, k, v, out, lse, scale)
    for buffer, gradient in zip((dq, dk, dv), KEPT[key], strict=True):
        buffer.copy_(gradient)


# -- less work while timed --------------------------------------------------------------------------------------------


def unless_timed(instead):
    """Make a target that computes when it is judged, and in one of eight timed calls; in others it does `instead`."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        if is_timed() and count("timed") % 8:
            return instead(q, k, v, scale, out)
        KEPT["latest"] = right(q, k, v, scale)
        return out.copy_(KEPT["latest"])

    return forward


nothing_while_timed = unless_timed(lambda q, k, v, scale, out: out)
zeros_while_timed = unless_timed(lambda q, k, v, scale, out: out.zero_())
latest_while_timed = unless_timed(lambda q, k, v, scale, out: out.copy_(KEPT["latest"]))
inputs_while_timed = unless_timed(lambda q, k, v, scale, out: (k.zero_(), out)[1])


@unless_timed
def half_while_timed(q, k, v, scale, out):
    out[:, :, ::2] = right(q[:, :, ::2], k, v, scale)
    return out


@unless_timed
def bits_while_timed(q, k, v, scale, out):
    q, k, v = (tensor.to(torch.float8_e4m3fn).float() for tensor in (q, k, v))
    return out.copy_(right(q, k, v, scale))


def drifts(q, k, v, *, scale, causal="none", out=None):
    return out if count("calls") > FIRST_CALLS else out.copy_(right(q, k, v, scale))


def answered_before_work(q, k, v, *, scale, causal="none", out=None):
    """Let the agent answer a command for timed calls at once, and make them in a thread later."""
    if count("calls") == 1:
        names = ("wire.commands", "candidate.series")
        commands, series = (importlib.import_module(f"pytest_fa.{name}") for name in names)
        run = series.PreparedSeries.run

        def run_later(self, calls):
            threading.Thread(target=lambda: (sleep(LATE_SECONDS), run(self, calls))).start()
            return commands.Done(inside_us=(1.0,), allocated=(None,) * len(self._outs))

        series.PreparedSeries.run = run_later
    return out.copy_(right(q, k, v, scale))


def skips_overwritten(q, k, v, *, scale, causal="none", out=None):
    """Skip a call whose output a later call of the series writes again, if there is one."""
    for frame in callers():
        if frame.f_code.co_name == "run" and "series" in frame.f_code.co_filename:
            series, calls = frame.f_locals["self"], frame.f_locals["count"]
            slot = series._calls[series._next - 1][-1]
            if any(call[-1] == slot for call in series._calls[series._next : calls]):
                return out
    sleep(REAL_SECONDS)
    return out.copy_(right(q, k, v, scale))


# -- clocks -----------------------------------------------------------------------------------------------------------


def slow_after(attack):
    """Make a correct target that takes at least `REAL_SECONDS`, and attacks a clock once."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        if count("clock") == 1:
            attack()
        sleep(REAL_SECONDS)
        return out.copy_(right(q, k, v, scale))

    return forward


@slow_after
def stopped_clocks():
    def now():
        return 0

    time.perf_counter_ns = time.monotonic_ns = time.time_ns = time.process_time_ns = now
    time.perf_counter = time.monotonic = time.time = now
    torch.cuda.Event = lambda *_, **__: type("Event", (), {"record": now, "elapsed_time": now})


class MethodDefinition(ctypes.Structure):
    """PyMethodDef of CPython's API: the name of a C function, its address, flags and text."""

    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int))


class FunctionObject(ctypes.Structure):
    """PyCFunctionObject of CPython's API, up to its definition."""

    _fields_ = (
        ("count", ctypes.c_ssize_t),
        ("type", ctypes.c_void_p),
        ("definition", ctypes.POINTER(MethodDefinition)),
    )


CODE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 0)


@slow_after
def detoured_clock():
    """Let the clock's own function object call other code: it stays the same object."""
    for function in (time.perf_counter_ns, time.monotonic_ns):
        definition = FunctionObject.from_address(id(function)).definition.contents
        definition.function = ctypes.cast(CODE, ctypes.c_void_p).value


def slow_warm_up(q, k, v, *, scale, causal="none", out=None):
    """Take long in the calls by which timing is planned, so that few calls are timed."""
    sleep(30 * REAL_SECONDS if count("calls") <= WARM_UP_CALLS else REAL_SECONDS)
    return out.copy_(right(q, k, v, scale))
