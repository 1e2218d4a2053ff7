"""Detect a profiler, sanitizer or debugger in this process, because it changes every measured time.  No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_fa.errors import ToolAttached

# Libraries that Nsight Compute, Nsight Systems, compute-sanitizer and cuda-gdb load into a process.
_LIBRARIES = re.compile(
    r"/(lib(?:TreeLauncher\w*|InterceptorInjectionTarget|cuda-injection|sanitizer-\w+|ToolsInjection\w*|nvperf_target"
    r"|cudadebugger)\.so[.\d]*)"
)
# Environment variables that these tools set.
_NAMES = re.compile(
    r"NVIDIA_PROCESS_INJECTION_|NV_SANITIZER_INJECTION_|NV_NSIGHT_INJECTION_|NSYS_PROFILING_SESSION_ID|QUADD_INJECTION"
)
_PATHS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def attached_tool(environment: Mapping[str, str], mapped: str) -> str | None:
    """The trace of an attached tool: a library in `mapped`, or an environment variable.  None if no tool is attached.

    `mapped` is the text of /proc/self/maps.
    """
    if match := _LIBRARIES.search(mapped):
        return match[1]
    for name in _PATHS:
        if environment.get(name, "none") not in ("", "none"):
            return f"{name}={environment[name]}"
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING, which synchronizes after each launch,"
    return next((name for name in environment if _NAMES.match(name)), None)


def require_no_tool() -> None:
    """Raise `ToolAttached` if a tool is attached to this process, because times would include its overhead."""
    maps = Path("/proc/self/maps")
    trace = attached_tool(os.environ, maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else "")
    if trace:
        raise ToolAttached(
            f"{trace} is in this process: nothing is timed under a tool; give --benchmark-disable to run without timing"
        )
