"""Exploits in Python of what a GPU has: events, streams, an allocator.  Each function is the target of one variant."""

from __future__ import annotations

import sys

import torch

KEPT = {}


def right(q, k, v, scale):
    """Return attention without a mask, [batch, heads, seq_q, head_dim]."""
    return (torch.softmax(q.float() @ k.float().transpose(2, 3) * scale, -1) @ v.float()).to(q.dtype)


def count(name):
    """How often this was called with a name, this call included."""
    KEPT[name] = KEPT.get(name, 0) + 1
    return KEPT[name]


def callers(name):
    """The values of `self` of the callers that have this name and belong to prepared series."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and "series" in frame.f_code.co_filename:
            yield frame.f_locals["self"]
        frame = frame.f_back


def halved_events(q, k, v, *, scale, causal="none", out=None):
    """Let CUDA events report half of the time between them."""
    if count("calls") == 1:
        elapsed_time = torch.cuda.Event.elapsed_time
        torch.cuda.Event.elapsed_time = lambda start, end: elapsed_time(start, end) / 2
    return out.copy_(right(q, k, v, scale))


def side_stream(q, k, v, *, scale, causal="none", out=None):
    """Work on a stream that waits for nothing, and for which nothing waits."""
    if "stream" not in KEPT:
        KEPT["stream"] = torch.cuda.Stream()
    with torch.cuda.stream(KEPT["stream"]):
        return out.copy_(right(q, k, v, scale))


def recycled_memory(q, k, v, *, scale, causal="none", out=None):
    """Return memory as the allocator gives it, in the hope that an earlier result lies there."""
    return torch.empty_like(q)


def static_output(q, k, v, *, scale, causal="none", out=None):
    """Return the same buffer in every call, and compute one of eight timed calls."""
    if "output" not in KEPT:
        KEPT["output"] = torch.empty_like(q)
    frame, is_timed = sys._getframe(), False
    while frame is not None and not is_timed:
        is_timed, frame = "series" in frame.f_code.co_filename, frame.f_back
    return KEPT["output"] if is_timed and count("timed") % 8 else KEPT["output"].copy_(right(q, k, v, scale))


def last_of_outputs(q, k, v, *, scale, causal="none", out=None):
    """Copy one number in a captured call whose output a later call of the graph writes again."""
    for series in callers("_call_next"):
        if torch.cuda.is_current_stream_capturing():
            slot, later = series._calls[series._next - 1][-1], series._calls[series._next :]
            if any(call[-1] == slot for call in later):
                KEPT["number"].copy_(q[0, 0, 0, 0])
                return out
    KEPT.setdefault("number", torch.empty_like(q[0, 0, 0, 0]))
    return out.copy_(right(q, k, v, scale))


def cheap_cold(q, k, v, *, scale, causal="none", out=None):
    """Write zeros in calls with a cold cache, except the first and the last."""
    for series in callers("cold"):
        if 1 < series._next < len(series._calls):
            return out.zero_()
    return out.copy_(right(q, k, v, scale))


def zeros_for_profiler(q, k, v, *, scale, causal="none", out=None):
    """Write zeros in the process of the profiler."""
    if any("profiled" in prepared._series for prepared in callers("execute")):
        return out.zero_()
    return out.copy_(right(q, k, v, scale))
