"""The ways in which Nsight Compute fails: how its output shows each one, and the sentence for the user."""

from __future__ import annotations

import re

from pytest_fa.features.ncu.nsight_report import NsightStatus

# Pattern in ncu's output -> status.  The first match counts, so a cause comes before the errors that follow from it.
_SIGNS: tuple[tuple[str, NsightStatus], ...] = (
    (r"ERR_NVGPUCTRPERM", "permission"),
    (r"LibraryNotLoaded|Device not supported|[Pp]rofiling is not supported on", "unsupported-runtime"),
    (r"Failed to connect to process|No attachable process|did not connect", "no-connection"),
    (r"driver resource.{0,40}unavailable|[Rr]esource unavailable|already in use by", "busy"),
    (r"Failed to find metric|[Ii]nvalid metric|[Uu]nknown metric", "bad-metric"),
    (r"No kernels were profiled", "no-kernels"),
)

SENTENCES: dict[NsightStatus, str] = {
    "ok": "",
    "not-installed": "ncu was not found on PATH or in a CUDA toolkit; install Nsight Compute",
    "permission": (
        "this user may not read the GPU's performance counters: run ncu as root (--ncu-sudo), start the container with "
        "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    ),
    "unsupported-runtime": (
        "the container runtime blocks Nsight Compute's access to the driver; use another runtime or run on the host"
    ),
    "busy": (
        "the performance counters are in use by another profiler or by DCGM (`dcgmi profile --pause` releases them), "
        "or the container lacks the capability to use them"
    ),
    "no-connection": (
        "Nsight Compute could not connect to the process that it started, not even without other injected libraries"
    ),
    "no-kernels": "no kernel ran inside the NVTX range, although the call succeeded: the range filter did not match",
    "bad-metric": "Nsight Compute rejected a counter without naming one that was requested",
    "no-report": "Nsight Compute succeeded but wrote no report",
    "empty": "the report contains no kernel",
    "wrong-kernel": "the report contains a kernel that is not in the variant's build",
    "launch-failed": "the call failed under the profiler",
    "timeout": "the profiled process did not end",
    "failed": "Nsight Compute failed",
}


def read_status(log: str, return_code: int) -> NsightStatus:
    """The status according to ncu's output.  The return code alone is not enough: it is 0 if no kernel was profiled."""
    for sign, status in _SIGNS:
        if re.search(sign, log):
            return status
    return "ok" if return_code == 0 else "failed"


def unknown_metrics(log: str, requested: tuple[str, ...]) -> tuple[str, ...]:
    """The requested counters that ncu's error lines name: those that this chip does not have."""
    errors = [line for line in log.splitlines() if re.search(r"metric", line, re.IGNORECASE) and "==" in line]
    bases = {name: re.escape(name.split(".")[0]) for name in requested}
    return tuple(name for name in requested if any(re.search(rf"(?<!\w){bases[name]}(?!\w)", line) for line in errors))


def last_error(log: str) -> str:
    """The first line that ncu marks with `==ERROR==`, without that mark; if there is none, the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    return errors[0] if errors else (lines[-1] if lines else "it printed nothing")
