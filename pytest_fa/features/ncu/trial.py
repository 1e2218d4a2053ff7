"""`python -m pytest_fa.features.ncu.trial`: launches an empty kernel in an NVTX range, to see if ncu can profile it."""

from __future__ import annotations

import sys

from pytest_fa.errors import FaError
from pytest_fa.gpu.cuda_driver import CudaDriver
from pytest_fa.wire.nvtx_range import nvtx_range

TRIAL_RANGE = "trial"


def main() -> int:
    """Launch the kernel inside the range.  Returns 1, with a message on standard error, if CUDA does not start."""
    try:
        with CudaDriver() as cuda, nvtx_range(TRIAL_RANGE):
            cuda.launch_empty_kernel()
    except FaError as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
