"""Whether a profiler, a sanitizer or a debugger sits in this process: then its clock is not the kernel's.  No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_fa.errors import ToolAttached

# Libraries that Nsight Compute, Nsight Systems, compute-sanitizer and cuda-gdb put into a process.
_LIBRARIES = re.compile(
    r"/(lib(?:TreeLauncher\w*|InterceptorInjectionTarget|cuda-injection|sanitizer-\w+|ToolsInjection\w*|nvperf_target"
    r"|cudadebugger)\.so[.\d]*)"
)
# What they leave in its environment.
_NAMES = re.compile(
    r"NVIDIA_PROCESS_INJECTION_|NV_SANITIZER_INJECTION_|NV_NSIGHT_INJECTION_|NSYS_PROFILING_SESSION_ID|QUADD_INJECTION"
)
_PATHS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def attached_tool(environment: Mapping[str, str], mapped: str) -> str | None:
    """What gives a tool away: a library that is `mapped` into the process, or a variable; None where nothing does."""
    if found := _LIBRARIES.search(mapped):
        return found[1]
    for name in _PATHS:
        if environment.get(name, "none") not in ("", "none"):
            return f"{name}={environment[name]}"
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING, which waits after each launch,"
    return next((name for name in environment if _NAMES.match(name)), None)


def require_no_tool() -> None:
    """Raise `ToolAttached` where this process is watched: a time taken in it would be another one."""
    maps = Path("/proc/self/maps")
    found = attached_tool(os.environ, maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else "")
    if found:
        raise ToolAttached(
            f"{found} is in this process: nothing is timed under a tool; give --benchmark-disable to run without timing"
        )
