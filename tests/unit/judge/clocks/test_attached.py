"""A process to which a profiler, sanitizer or debugger is attached is not timed."""

from __future__ import annotations

import pytest

from pytest_fa.errors import ToolAttached
from pytest_fa.judge.clocks.attached import attached_tool, require_no_tool

LINE = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
NCU = "/opt/nvidia/nsight-compute/2025.3.1/target/linux-desktop-glibc_2_11_3-x64/libcuda-injection.so"
SANITIZER = "/usr/local/cuda/compute-sanitizer/libInterceptorInjectionTarget.so"
NSYS = "/opt/nvidia/nsight-systems/2025.3.2/target-linux-x64/libToolsInjection64.so"
HARMLESS = "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/site-packages/nvidia/cuda_cupti/lib/libcupti.so.13"


@pytest.mark.parametrize("path", [NCU, SANITIZER, NSYS])
def test_a_tool_is_detected_by_its_library(path: str) -> None:
    """A tool is named by the library that it loads into the process."""
    maps = "".join(LINE.format(each) for each in (*HARMLESS, path))
    assert path.rpartition("/")[2] == attached_tool({}, maps)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_INJECTION64_PATH": "/x.so"}, "CUDA_INJECTION64_PATH=/x.so"),
        ({"NSYS_PROFILING_SESSION_ID": "1"}, "NSYS_PROFILING_SESSION_ID"),
        ({"NV_SANITIZER_INJECTION_PORT_BASE": "49152"}, "NV_SANITIZER_INJECTION_PORT_BASE"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING, which synchronizes after each launch,"),
        ({"CUDA_INJECTION64_PATH": "none", "CUDA_LAUNCH_BLOCKING": "0", "PATH": "/opt/nsys"}, None),
    ],
)
def test_a_tool_is_detected_by_its_environment_variable(environment: dict[str, str], expected: str | None) -> None:
    """A tool is named by its environment variable; an injection path of `none` is no tool."""
    assert expected == attached_tool(environment, "".join(LINE.format(each) for each in HARMLESS))


def test_a_plain_process_may_be_timed() -> None:
    """In a process without a tool, `require_no_tool` does not raise."""
    require_no_tool()


def test_a_process_with_a_tool_may_not_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the trace of the tool and the option that runs without timing."""
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/x.so")
    with pytest.raises(ToolAttached, match=r"CUDA_INJECTION64_PATH=/x.so is in this process: .*--benchmark-disable"):
        require_no_tool()
