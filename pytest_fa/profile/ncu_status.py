"""Every way in which Nsight Compute fails, known by its own words, and the sentence that a user reads."""

from __future__ import annotations

import re

from pytest_fa.records.tool_results import NsightStatus

# In the order in which they are looked for: what denies everything comes before what follows from it.
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
    "not-installed": "ncu is neither on PATH nor in a CUDA toolkit; install Nsight Compute",
    "permission": (
        "this user may not read the GPU's counters: run as root (--ncu-sudo), give the container "
        "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    ),
    "unsupported-runtime": "the container's runtime keeps Nsight Compute from the driver; another may let it through",
    "busy": (
        "something else holds the counters (DCGM: `dcgmi profile --pause`; another profiler), "
        "or the container lacks the capability to take them"
    ),
    "no-connection": "Nsight Compute could not connect to the process it started, also without injected libraries",
    "no-kernels": "no kernel ran inside the NVTX range, although everything ended well: the filter missed it",
    "bad-metric": "Nsight Compute does not know a counter, and does not say which could be left out",
    "no-report": "Nsight Compute ended well and wrote no report",
    "empty": "the report holds no kernel",
    "wrong-kernel": "the report holds a kernel that is not the variant's own",
    "launch-failed": "the call failed under the profiler",
    "timeout": "no end was in sight",
    "failed": "Nsight Compute failed",
}


def read_status(log: str, return_code: int) -> NsightStatus:
    """What ncu's own lines say; `No kernels were profiled` comes with a return code of 0."""
    for sign, status in _SIGNS:
        if re.search(sign, log):
            return status
    return "ok" if return_code == 0 else "failed"


def unknown_metrics(log: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """The counters of `asked` that ncu's error lines name: those this chip lacks."""
    errors = [line for line in log.splitlines() if re.search(r"metric", line, re.IGNORECASE) and "==" in line]
    bases = {name: re.escape(name.split(".")[0]) for name in asked}
    return tuple(name for name in asked if any(re.search(rf"(?<!\w){bases[name]}(?!\w)", line) for line in errors))


def last_error(log: str) -> str:
    """The first line of ncu's trouble, without its mark."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    marked = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    return marked[0] if marked else (lines[-1] if lines else "it said nothing")
