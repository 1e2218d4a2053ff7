"""Why a kernel is slow: Nsight Compute, compute-sanitizer and machine code, all from pytest's side.  No torch."""
