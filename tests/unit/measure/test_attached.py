"""A process with a tool in it is not timed."""

from __future__ import annotations

import pytest

from pytest_fa.errors import ToolAttached
from pytest_fa.measure.attached import attached_tool, require_no_tool

LINE = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
NCU = "/opt/nvidia/nsight-compute/2025.3.1/target/linux-desktop-glibc_2_11_3-x64/libcuda-injection.so"
SANITIZER = "/usr/local/cuda/compute-sanitizer/libInterceptorInjectionTarget.so"
NSYS = "/opt/nvidia/nsight-systems/2025.3.2/target-linux-x64/libToolsInjection64.so"
HARMLESS = "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/site-packages/nvidia/cuda_cupti/lib/libcupti.so.13"


@pytest.mark.parametrize("path", [NCU, SANITIZER, NSYS])
def test_a_tools_library_gives_it_away(path: str) -> None:
    """Each tool puts a library of its own into the process."""
    maps = "".join(LINE.format(each) for each in (*HARMLESS, path))
    assert path.rpartition("/")[2] == attached_tool({}, maps)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_INJECTION64_PATH": "/x.so"}, "CUDA_INJECTION64_PATH=/x.so"),
        ({"NSYS_PROFILING_SESSION_ID": "1"}, "NSYS_PROFILING_SESSION_ID"),
        ({"NV_SANITIZER_INJECTION_PORT_BASE": "49152"}, "NV_SANITIZER_INJECTION_PORT_BASE"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING, which waits after each launch,"),
        ({"CUDA_INJECTION64_PATH": "none", "CUDA_LAUNCH_BLOCKING": "0", "PATH": "/opt/nsys"}, None),
    ],
)
def test_a_tools_variable_gives_it_away(environment: dict[str, str], expected: str | None) -> None:
    """A path of a library to inject, a session's number; a path that is `none` injects nothing."""
    assert expected == attached_tool(environment, "".join(LINE.format(each) for each in HARMLESS))


def test_a_plain_process_may_be_timed() -> None:
    """This one has no tool in it."""
    require_no_tool()


def test_a_watched_process_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what was found and how to run without timing."""
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/x.so")
    with pytest.raises(ToolAttached, match=r"CUDA_INJECTION64_PATH=/x.so is in this process: .*--benchmark-disable"):
        require_no_tool()
