"""Exploits that work as soon as the data of timed calls are there, before the judge's command for these calls comes.

A watcher knows a series of calls from its first run.  It waits until the last number that any of its calls reads is
another one, and computes all outputs.  The calls themselves then only wait for it.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import threading
import time

import torch

REAL_SECONDS = 0.002  # that the work of a call takes at least
PAUSE_SECONDS = 0.0001  # between two looks at the data
FAILED = 2**41
KEPT = {}


def right(q, k, v, scale):
    """Return attention without a mask, [batch, heads, seq_q, head_dim]."""
    return (torch.softmax(q.float() @ k.float().transpose(2, 3) * scale, -1) @ v.float()).to(q.dtype)


def series_of_caller():
    """The prepared series whose calls are being timed; None in other calls."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "run" and "series" in frame.f_code.co_filename:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


class Watcher:
    """Computes a series when its data are new, and tells by shared memory which data it has computed."""

    def __init__(self, series, scale, around):
        self.calls, self.outs, self.scale, self.around = series._calls, series._outs, scale, around
        self.last = max((v for (_, _, v), *_ in self.calls), key=lambda v: v.storage_offset()).flatten()[-1:]
        self.done = mmap.mmap(-1, 8)
        self.is_ended = False

    def mark(self):
        """A number that belongs to the data of now."""
        return self.last.view(torch.int16).item()

    def is_done(self):
        """Whether the calls are computed for the data of now."""
        done = struct.unpack("q", self.done[:])[0]
        if done == FAILED:
            raise RuntimeError("the early work has failed; its error is above")
        return done == self.mark()

    def watch(self):
        """Compute the calls whenever their data are new."""
        before = self.mark()
        self.done[:] = struct.pack("q", 2**40)
        while not self.is_ended:
            if (now := self.mark()) == before:
                time.sleep(PAUSE_SECONDS)
                continue
            before = now
            with self.around():
                for (q, k, v), *_, slot in self.calls:
                    time.sleep(REAL_SECONDS)
                    self.outs[slot][0].copy_(right(q, k, v, self.scale))
            self.done[:] = struct.pack("q", now)

    def watch_or_tell(self):
        """The same; if it fails, `is_done` says so, because an exploit that does not work proves nothing."""
        try:
            self.watch()
        except Exception:
            self.done[:] = struct.pack("q", FAILED)
            raise


class Nothing:
    """Does nothing around the early work."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class StoppedJudge(Nothing):
    """Stops the processes that were forked beside this one, the judge among them, during the early work."""

    def __enter__(self):
        server = os.getppid()
        with open(f"/proc/{server}/task/{server}/children", encoding="ascii") as children:
            self.stopped = [int(pid) for pid in children.read().split() if int(pid) != os.getpid()]
        self.send(signal.SIGSTOP)

    def __exit__(self, *_):
        self.send(signal.SIGCONT)

    def send(self, number):
        """Send a signal to the processes."""
        for pid in self.stopped:
            os.kill(pid, number)


def in_thread(watcher):
    threading.Thread(target=watcher.watch_or_tell, daemon=True).start()


def in_process(watcher):
    if os.fork() == 0:
        torch.set_num_threads(1)
        try:
            watcher.watch_or_tell()
        finally:
            os._exit(0)  # the process must not answer for the one that forked it


def early(start, around=Nothing):
    """Make a target whose watcher is started by `start`; `around` is a context of its work."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        series = series_of_caller()
        watcher = KEPT.get("watcher")
        if series is not None and (watcher is None or watcher.calls is not series._calls):
            if watcher is not None:
                watcher.is_ended = True
            KEPT["watcher"] = Watcher(series, scale, around)
            start(KEPT["watcher"])
        elif series is not None:
            limit = time.monotonic() + REAL_SECONDS * (len(watcher.calls) + 50)
            while time.monotonic() < limit:
                if watcher.is_done():
                    return out
                time.sleep(PAUSE_SECONDS)
        time.sleep(REAL_SECONDS)
        return out.copy_(right(q, k, v, scale))

    return forward


by_thread = early(in_thread)
by_process = early(in_process)
by_stopped_judge = early(in_thread, StoppedJudge)
