"""Functions that raise, end their process, or do not end.  Each is the target of one variant."""

from __future__ import annotations

import os
import time


def raises(q, k, v, *, scale, causal="none", out=None):
    raise ValueError("a hole")


def exits(q, k, v, *, scale, causal="none", out=None):
    os.abort()


def sleeps(q, k, v, *, scale, causal="none", out=None):
    time.sleep(3600)
