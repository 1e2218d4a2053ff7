"""The profiler is loaded without what it does not need."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import sys
from pytest_fa.measure.profiler_time import load_profiler
load_profiler("cpu")
print(*sorted({"torch.autograd.profiler", "torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_the_profiler_loads_no_compiler() -> None:
    """The first profile of a process does not import torch.compile's compiler, which takes seconds."""
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert "torch.autograd.profiler" == run.stdout.strip()
