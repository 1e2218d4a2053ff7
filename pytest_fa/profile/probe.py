"""`python -m pytest_fa.profile.probe`: the least program with a kernel in an NVTX range, to be profiled."""

from __future__ import annotations

import sys

import nvtx

from pytest_fa.errors import FaError
from pytest_fa.jobs import NVTX_DOMAIN, PROBE_RANGE
from pytest_fa.profile.cuda_driver import CudaDriver


def main() -> int:
    """Launch one kernel inside the range; 1 and a line where CUDA does not start."""
    try:
        with CudaDriver() as cuda:
            domain = nvtx.get_domain(NVTX_DOMAIN)
            handle = domain.start_range(domain.get_event_attributes(message=PROBE_RANGE))
            cuda.launch_empty_kernel()
            domain.end_range(handle)
    except FaError as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
